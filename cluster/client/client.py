"""Client and AsyncClient: quire.v1 for programs that block while they wait, and for asyncio."""

from __future__ import annotations

from ...proto.errors import QuireError
from .methods import Methods
from .waiting import Asynchronous, Blocking


class Client(Blocking, Methods):
    """Connection to a quire server. Threads may share one client.

    A method that is declared with ``Call[T]`` returns a ``T``; `generate_stream`, `chat_stream` and `watch_events`
    return a generator of ``T``.

    Args:
        target: the server's ``HOST:PORT``, or those of several gateways of one fleet, separated by commas. The next
            one is called when one cannot be reached; streams continue there.
        token: bearer token, if the server requires one.
        tls_ca: PEM file of the authority that signed the server's certificate; None connects without TLS.
        tls_cert: PEM file of the client's own certificate and its key, if the server asks for one.
        timeout_s: default deadline of a call; None means no deadline.

    Raises:
        ConfigError: the authority's file cannot be read.
    """

    def is_ready(self) -> bool:
        """Return whether the server can be reached and serves a model."""
        try:
            return self._wait(self._check_health)
        except QuireError:
            return False


class AsyncClient(Asynchronous, Methods):
    """Client for asyncio with the methods and arguments of Client. Create it in the event loop that uses it.

    The methods return coroutines and asynchronous generators; ``aclose()`` of a generator ends its request.
    """

    async def is_ready(self) -> bool:
        """See `Client.is_ready`."""
        try:
            return await self._wait(self._check_health)
        except QuireError:
            return False
