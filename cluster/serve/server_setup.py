"""The checks of every `quire serve` before it starts anything."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from ...proto.errors import ConfigError
from ..config.server_options import ServerOptions
from ..gateway.listen_address import ListenAddress
from ..gateway.retention import RetentionLimits
from ..gateway.security import Security
from ..host.logs import log_to_stderr
from ..metrics.call_log import CallLog
from ..requests.observer import RequestObserver
from ..tracing.export import exported_traces


def set_up_server(options: ServerOptions) -> Security:
    """Log to stderr, and check the options before anything is started; the gateway checks the address again.

    Raises:
        ConfigError: a file cannot be read, or the address cannot be listened on.
    """
    log_to_stderr(options.log_level, options.log_format)
    security = Security.load(options)
    _check_address(options.listen, "listen", security, options)
    if not options.no_http:
        _check_address(options.http, "http", security, options)
    return security


@contextmanager
def request_observers(options: ServerOptions) -> Iterator[list[RequestObserver]]:
    """Yield the observers of requests that the options ask for, beside the metrics.

    Raises:
        ConfigError: traces cannot be sent.
    """
    with exported_traces(options.otlp_traces_endpoint) as traces:
        yield [*traces, *([CallLog()] if options.log_requests else [])]


def retention_limits(options: ServerOptions) -> RetentionLimits:
    """Return the limits of what the gateway keeps for repeated and resumed calls."""
    return RetentionLimits(resume_window_s=options.resume_window_s, retention_s=options.retention_s)


def _check_address(text: str, option: str, security: Security, options: ServerOptions) -> None:
    address = ListenAddress.parse(text)
    security.check_listen(address, insecure=options.insecure)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        what_to_do = f"choose another with --{option} HOST:PORT" + (
            ", or serve gRPC alone with --no-http" if option == "http" else ""
        )
        raise ConfigError(f"cannot listen on {address}: {error.strerror}; {what_to_do}") from error
