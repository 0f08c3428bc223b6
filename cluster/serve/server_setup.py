"""Steps that every `quire serve` has: the checks before it starts anything, and the wait until it is ready."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from ...proto.errors import ConfigError
from ..config.server_options import ServerOptions
from ..gateway.listen_address import ListenAddress
from ..gateway.security import Security
from ..gateway.server import Gateway
from ..host.logs import log_to_stderr


def set_up_server(options: ServerOptions) -> Security:
    """Log to stderr, and check the options before anything is started; the gateway checks the address again.

    Raises:
        ConfigError: a file cannot be read, or the address cannot be listened on.
    """
    log_to_stderr()
    security = Security.load(options)
    address = ListenAddress.parse(options.listen)
    security.check_listen(address, insecure=options.insecure)
    _check_port(address)
    return security


async def wait_until_ready(
    gateway: Gateway, *ends: asyncio.Future[Any], timeout_s: float | None = None
) -> bool:
    """Wait until the gateway is ready, one of `ends` is done, or the time is over; return if it is ready."""
    ready = asyncio.ensure_future(gateway.wait_ready())
    await asyncio.wait((ready, *ends), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    is_ready = ready.done()
    ready.cancel()
    return is_ready


def _check_port(address: ListenAddress) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
