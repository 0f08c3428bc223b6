"""SilentClient: an HTTP/2 client whose window is zero, so that no byte of a response can be sent to it."""

from __future__ import annotations

import asyncio
import struct
from types import TracebackType

from google.protobuf.message import Message

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4  # a setting
_WINDOW_BYTES = 1 << 14


class SilentClient:
    """Makes gRPC calls, and reads no response before `read`.

    Args:
        target: HOST:PORT of a server without TLS.
        answers_pings: keepalive does not end the connection.

    Attributes:
        ended: streams that the server has ended.
    """

    def __init__(self, target: str, *, answers_pings: bool = True) -> None:
        self._target = target
        self._answered = {_SETTINGS, _PING} if answers_pings else {_SETTINGS}
        self._next_stream = 1
        self.ended: set[int] = set()

    async def __aenter__(self) -> SilentClient:
        host, _, port = self._target.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        self._writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0)))
        self._answering = asyncio.create_task(self._answer())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self._writer.transport.abort()

    def call(self, method: str, request: Message, *, ends: bool = True) -> int:
        """Start a call, such as ``/grpc.health.v1.Health/Watch``, and return its stream.

        Args:
            ends: no other message follows.
        """
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        raw = request.SerializeToString()
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        message = b"\0" + struct.pack(">I", len(raw)) + raw
        self._writer.write(
            _frame(_HEADERS, _END_HEADERS, stream, block)
            + _frame(_DATA, _END_STREAM if ends else 0, stream, message)
        )
        return stream

    def read(self, stream: int) -> None:
        """Let the server send what waits for the stream."""
        self._writer.write(_frame(_WINDOW_UPDATE, 0, stream, struct.pack(">I", _WINDOW_BYTES)))

    async def _answer(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
                if head[3] in self._answered and not head[4] & _ACK:
                    self._writer.write(_frame(head[3], _ACK, 0, payload if head[3] == _PING else b""))
                if head[3] == _HEADERS and head[4] & _END_STREAM:
                    self.ended.add(int.from_bytes(head[5:]))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _text(value: str) -> bytes:
    """Return a literal of HPACK, without Huffman code."""
    raw = value.encode()
    assert len(raw) < 127, f"{value!r} needs a longer form"
    return bytes((len(raw),)) + raw
