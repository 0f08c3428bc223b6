"""Line: a reader's connection for messages with one rank of another replica."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import zmq

from ...proto.block_tables import IntArray
from ...proto.errors import ProtocolError
from ...proto.kv_transfer import KvFailure
from ...proto.transport.network import CurveKeys, connect
from .kv_blocks import Heads
from .messages import MAX_FRAME_BYTES, KvReadError, ReadDone, WireMessage, wire


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Heads of blocks to be read.

    Attributes:
        sources, targets: the lender's blocks, and the reader's.
    """

    read_id: int
    generation: int
    group: int
    sources: IntArray
    targets: IntArray
    heads: Heads
    num_bytes: int


class Line:
    """The connection for messages."""

    def __init__(self, description: str, keys: CurveKeys | None) -> None:
        self.endpoint, _, self.instance = description.partition("#")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        with suppress(zmq.ZMQError, AssertionError):  # nobody answers then
            connect(self._socket, self.endpoint, keys)

    def send(self, message: WireMessage) -> None:
        """Send a message. Raises KvReadError instead of waiting for a peer that takes none."""
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise KvReadError(KvFailure.UNREACHABLE, f"{self.endpoint} takes no messages") from None

    def receive(self, timeout_s: float) -> tuple[WireMessage, bytes | memoryview] | None:
        """Return the next message and the bytes that follow it; None if none arrives in time."""
        if not self._socket.poll(max(0, round(1000 * timeout_s))):
            return None
        first, *rest = self._socket.recv_multipart(copy=False)
        return self.decode(first.bytes), rest[0].buffer if rest else b""

    def decode(self, raw: bytes) -> WireMessage:
        try:
            return wire.decode(raw)
        except ProtocolError as error:
            raise KvReadError(KvFailure.CORRUPT, f"{self.endpoint}: {error}") from None

    def check(self, done: ReadDone) -> None:
        """Raise KvReadError if a read has failed."""
        if done.failure:
            raise KvReadError(KvFailure(done.failure), f"{self.endpoint} gives no blocks")

    def close(self) -> None:
        self._context.destroy()
