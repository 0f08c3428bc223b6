"""TcpProxy: a proxy on loopback whose connections a test can break, delay and hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class TcpProxy:
    """Passes bytes on between clients and one server.

    Attributes:
        address: HOST:PORT that clients connect to.
        num_connections: that were accepted so far.
        num_bytes: of the server that were passed on so far.
        delay_s: returns the delay of the next bytes, in either direction; None passes them on at once.
        cut_after: the next connection breaks once it has passed on this many bytes of the server; None passes on all.
        num_cuts: connections that broke so.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self.address = ""
        self.num_connections = self.num_bytes = self.num_cuts = 0
        self.cut_after: int | None = None
        self.delay_s: Callable[[], float] | None = None
        self._may_pass = asyncio.Event()
        self._may_pass.set()

    def hold(self) -> None:
        """Pass nothing on until `release`, as in a network that is cut: connections stay open."""
        self._may_pass.clear()

    def release(self) -> None:
        self._may_pass.set()

    def break_connections(self) -> None:
        """Reset every connection, without the bytes that are on their way."""
        for writer in self._writers:
            writer.transport.abort()

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on in both directions until one side closes."""
        self.num_connections += 1
        cut_after, self.cut_after = self.cut_after, None
        try:
            server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        except ConnectionError:  # the server has ended
            writer.transport.abort()
            return
        ends = {writer, server_writer}
        self._writers |= ends
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, server_writer))
                group.create_task(self._pass_on(server_reader, writer, cut_after, self._count))
        except* (ConnectionError, EOFError):
            pass
        finally:
            for end in ends:
                end.transport.abort()
            self._writers -= ends

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        num_bytes: int | None = None,
        count: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        while data := await reader.read(1 << 16):
            await self._may_pass.wait()
            if self.delay_s is not None:
                await asyncio.sleep(self.delay_s())
            if num_bytes is not None:
                data, num_bytes = data[:num_bytes], num_bytes - len(data)
            count(len(data))
            writer.write(data)
            await writer.drain()
            if num_bytes is not None and num_bytes <= 0:
                self.num_cuts += 1
                break
        raise EOFError


@asynccontextmanager
async def tcp_proxy(target: str) -> AsyncIterator[TcpProxy]:
    """Run a proxy to the server at `target`."""
    proxy = TcpProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield proxy
    finally:
        server.close()
        proxy.break_connections()
