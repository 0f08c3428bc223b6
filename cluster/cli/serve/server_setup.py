"""The checks of every `quire serve` before it starts anything."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ....proto.errors import ConfigError, Problems
from ...config.server_options import ServerOptions
from ...gateway.access.security import ListenAddress, Security
from ...gateway.generation.retention import RetentionLimits
from ...gateway.metrics.call_log import CallLog
from ...gateway.tracing.export import exported_traces
from ...gateway.tracing.trace_recorder import recorded_trace
from ...os_utils.logs import log_to_stderr
from ...text.requests.observer import RequestObserver

PORTS_TO_TRY = 20
MAX_PORT = 65_535


def set_up_server(options: ServerOptions) -> Security:
    """Log to stderr, and check the options before anything is started; the gateway checks the address again.

    Raises:
        ConfigError: a file cannot be read, or an address cannot be listened on; names all problems.
    """
    log_to_stderr(options.log_level, options.log_format)
    security = Security.load(options)
    problems = Problems()
    with problems:
        _check_address(options.listen, "listen", security, options)
    if not options.no_http:
        with problems:
            _check_address(options.http, "http", security, options)
    problems.raise_any()
    return security


@contextmanager
def request_observers(options: ServerOptions) -> Iterator[list[RequestObserver]]:
    """Yield the observers of requests that the options ask for, beside the metrics.

    Raises:
        ConfigError: traces cannot be sent or recorded.
    """
    path = None if options.record_trace is None else Path(options.record_trace)
    with exported_traces(options.otlp_traces_endpoint) as traces, recorded_trace(path) as recorders:
        yield [*traces, *recorders, *([CallLog()] if options.log_requests else [])]


def retention_limits(options: ServerOptions) -> RetentionLimits:
    """Return the limits of what the gateway keeps for repeated and resumed calls."""
    return RetentionLimits(resume_window_s=options.resume_window_s, retention_s=options.retention_s)


def _check_address(text: str, option: str, security: Security, options: ServerOptions) -> None:
    address = ListenAddress.parse(text)
    security.check_listen(address, insecure=options.insecure)
    try:
        _listen_once(address)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        free = _next_free(address) if is_taken else None
        what_to_do = f"choose another with --{option} {free or 'HOST:PORT'}" + (
            ", or serve gRPC alone with --no-http" if option == "http" else ""
        )
        reason = os.strerror(errno.EADDRINUSE) if is_taken else error.strerror
        raise ConfigError(f"cannot listen on {address}: {reason}; {what_to_do}") from error


def _next_free(address: ListenAddress) -> ListenAddress | None:
    """Return the address with the next port that is free now; None if the next PORTS_TO_TRY are taken."""
    for port in range(address.port + 1, min(address.port + PORTS_TO_TRY, MAX_PORT) + 1):
        candidate = address.with_port(port)
        with suppress(OSError):
            _listen_once(candidate)
            return candidate
    return None


def _listen_once(address: ListenAddress) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    socket.create_server((address.host, address.port), family=family).close()
