"""KvTransport: how ranks of different replicas read each other's blocks.

A rank registers its blocks, describes where they are served, and connects to peers by their descriptions. A peer's
reads are answered in order; `poll` returns those that are done.

`ZmqTransport` serves over ipc on one host, and over tcp, encrypted with the fleet's keys, between hosts. A reader on
the same host lends the owner a piece of shared memory, into which the bytes go directly; otherwise they follow the
answer as a frame.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zmq

from ...proto.block_tables import IntArray
from ...proto.codec import FrameCodec
from ...proto.errors import ProtocolError
from ...proto.kv_layout import KvLayout
from ...proto.kv_transfer import KvFailure
from ...proto.transport.network import CurveGuard, CurveKeys, bind, connect
from ...proto.transport.wakeup import Wakeup
from ..memory.shared_segment import SegmentAddress, SharedSegment
from .kv_blocks import ByteArray, Heads, KvBlocks, checksum

# Bytes of a read: small enough that reading, checking and writing overlap.
READ_BYTES = 4 << 20
# Reads of a peer at once.
READS_AT_ONCE = 2
# Largest answer that is accepted; a single block may exceed READ_BYTES.
MAX_FRAME_BYTES = 256 << 20
# How long a server waits for a lease that its plan has yet to bring.
GRANT_PATIENCE_S = 2.0
# Segments of readers that a server keeps mapped.
MAX_MAPPED = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hello:
    """Asks for a comparison of layouts; a Welcome answers."""

    instance: str
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's own layout.

    Attributes:
        problem: the fields that differ; empty if the ranks may exchange blocks.
    """

    layout: KvLayout
    problem: str


@dataclass(frozen=True, slots=True)
class Read:
    """Asks for heads of blocks of a lease; a ReadDone answers.

    Attributes:
        heads: (first, count) of each layer of the group, one after the other.
        buffer: shared memory for the bytes, from its start; None if they are to follow the answer.
    """

    read_id: int
    instance: str
    generation: int
    group: int
    block_ids: IntArray
    heads: IntArray
    buffer: SegmentAddress | None


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The end of a read.

    Attributes:
        failure: why there are no bytes; empty if there are.
        is_in_buffer: they are in the reader's shared memory.
    """

    read_id: int
    failure: str
    checksum: int
    is_in_buffer: bool


@dataclass(frozen=True, slots=True)
class Release:
    """Tells that a lease is needed no more."""

    instance: str
    generation: int


WireMessage = Hello | Welcome | Read | ReadDone | Release
_wire = FrameCodec[WireMessage](
    "kv transfer",
    1,
    {"hello": Hello, "welcome": Welcome, "read": Read, "done": ReadDone, "release": Release},
)


class KvPeer(Protocol):
    """A connection to one rank of another replica. For one thread."""

    def hello(self, layout: KvLayout, timeout_s: float) -> KvLayout:
        """Return the peer's layout.

        Raises:
            KvReadError: it does not answer, or has a layout with which no blocks can be exchanged.
        """
        ...

    def read(self, generation: int, group: int, block_ids: IntArray, heads: Heads, num_bytes: int) -> int:
        """Begin to read heads of blocks; return the number of the read, at most READS_AT_ONCE at a time."""
        ...

    def poll(self, timeout_s: float) -> tuple[int, ByteArray] | None:
        """Return a read that is done, with its bytes, which the next `read` may overwrite; None if none is yet.

        Raises:
            KvReadError: the lease has ended, or the bytes are not those that were sent.
        """
        ...

    def release(self, generation: int) -> None:
        """Tell the peer that a lease is needed no more."""
        ...

    def close(self) -> None:
        """Cancel the reads and close."""
        ...


class KvTransport(Protocol):
    """One rank's end of all exchanges."""

    def register(self, blocks: KvBlocks) -> None:
        """Serve blocks from now on, those of leases."""
        ...

    def describe(self) -> str:
        """Return where this rank serves, for `connect` of another one."""
        ...

    def connect(self, description: str) -> KvPeer: ...

    def close(self) -> None:
        """Serve no more. Safe to call twice."""
        ...


class KvReadError(Exception):
    """A failed exchange with a peer.

    Attributes:
        reason: of the failure.
    """

    def __init__(self, reason: KvFailure, problem: str) -> None:
        super().__init__(f"{reason}: {problem}")
        self.reason = reason


class LeaseTable(Protocol):
    """Leases as a server sees them, from any thread."""

    def covers(self, generation: int, block_ids: IntArray, patience_s: float) -> bool:
        """Return whether a lease is in effect and has all these blocks; wait for it to come into effect."""
        ...

    def on_read(self, generation: int) -> None:
        """Note that a reader used a lease."""
        ...

    def on_release(self, generation: int) -> None:
        """Note that a reader needs a lease no more."""
        ...


class ZmqTransport:
    """A KvTransport over ZeroMQ, with a thread that serves.

    Args:
        endpoint: where to bind, ipc or tcp.
        keys: of the fleet, over tcp.
        leases: which blocks may be read.
        run: runs the server's body, with its device current.
    """

    def __init__(
        self,
        endpoint: str,
        keys: CurveKeys | None,
        leases: LeaseTable,
        run: Callable[[Callable[[], None]], None] = lambda body: body(),
    ) -> None:
        self._keys, self._leases, self._run = keys, leases, run
        self._instance = secrets.token_hex(8)
        self._blocks: KvBlocks | None = None
        self._segments: dict[str, ByteArray] = {}  # name |-> mapped memory of a reader
        self._context = zmq.Context()
        self._guard = None if keys is None else CurveGuard(self._context, keys)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._router.setsockopt(zmq.LINGER, 0)
        self._stop = Wakeup(self._context)
        try:
            self._endpoint = bind(self._router, endpoint, keys)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._thread: threading.Thread | None = None

    def register(self, blocks: KvBlocks) -> None:
        self._blocks = blocks
        self._thread = threading.Thread(target=self._run, args=(self._serve,), name="kv-server", daemon=True)
        self._thread.start()

    def describe(self) -> str:
        return f"{self._endpoint}#{self._instance}"

    def connect(self, description: str) -> KvPeer:
        return _ZmqPeer(description, self._keys)

    def close(self) -> None:
        if self._context.closed:
            return
        self._stop.wake()
        if self._thread is not None:
            self._thread.join()
        self._stop.close()
        if self._guard is not None:
            self._guard.close()
        self._context.destroy(linger=0)
        self._segments.clear()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stop.socket, zmq.POLLIN)
        while self._stop.socket not in dict(poller.poll()):
            peer, *frames = self._router.recv_multipart()
            try:
                self._handle(peer, _wire.decode(frames[-1] if frames else b""))
            except ProtocolError as error:
                _log.warning("ignored a message of a rank that reads KV: %s", error)
            except zmq.ZMQError as error:
                _log.warning("a rank that reads KV is gone: %s", error)

    def _handle(self, peer: bytes, message: WireMessage) -> None:
        assert self._blocks is not None
        own = self._blocks.layout
        match message:
            case Hello():
                problem = "; ".join(own.whole.differences(message.layout.whole))
                if message.instance != self._instance:
                    problem = "the rank that lent the blocks has ended"
                self._send(peer, Welcome(own, problem))
            case Read():
                self._answer(peer, message, self._blocks)
            case Release() if message.instance == self._instance:
                self._leases.on_release(message.generation)

    def _answer(self, peer: bytes, read: Read, blocks: KvBlocks) -> None:
        """Answer a read: with bytes only if the lease was in effect before and after they were copied."""
        is_valid = read.instance == self._instance and self._leases.covers(
            read.generation, read.block_ids, GRANT_PATIENCE_S
        )
        heads = _unpack_heads(read.heads)
        if not is_valid or not 0 <= read.group < len(blocks.layout.groups):
            self._send(peer, ReadDone(read.read_id, KvFailure.STALE, 0, is_in_buffer=False))
            return
        num_bytes = len(read.block_ids) * blocks.block_bytes(read.group, heads)
        if num_bytes > MAX_FRAME_BYTES:
            self._send(peer, ReadDone(read.read_id, KvFailure.REFUSED, 0, is_in_buffer=False))
            return
        shared = self._map(read.buffer, num_bytes)
        content = np.empty(num_bytes, np.uint8) if shared is None else shared[:num_bytes]
        blocks.gather(read.group, read.block_ids, heads, content)
        total = checksum(content)
        if not self._leases.covers(read.generation, read.block_ids, 0.0):
            self._send(peer, ReadDone(read.read_id, KvFailure.STALE, 0, is_in_buffer=False))
            return
        self._leases.on_read(read.generation)
        done = ReadDone(read.read_id, "", total, is_in_buffer=shared is not None)
        self._send(peer, done, None if shared is not None else content)

    def _map(self, address: SegmentAddress | None, num_bytes: int) -> ByteArray | None:
        """Return a reader's shared memory; None if it has none that this process can map."""
        if address is None or address.num_bytes < num_bytes:
            return None
        if address.name not in self._segments:
            try:
                segment = SharedSegment.open(address)
            except OSError:  # on another host, or of another user
                return None
            if len(self._segments) >= MAX_MAPPED:
                del self._segments[next(iter(self._segments))]
            self._segments[address.name] = np.frombuffer(segment.map(), np.uint8)
            segment.close()
        return self._segments[address.name]

    def _send(self, peer: bytes, message: WireMessage, content: ByteArray | None = None) -> None:
        frames: list[Any] = [peer, _wire.encode(message)]
        if content is not None:
            frames.append(content)
        self._router.send_multipart(frames, copy=content is None)


class _ZmqPeer:
    """A connection of ZmqTransport; see KvPeer.

    It has READS_AT_ONCE pieces of shared memory, which grow with the largest read.
    """

    def __init__(self, description: str, keys: CurveKeys | None) -> None:
        self._endpoint, _, self._instance = description.partition("#")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._shares = True  # until the peer shows that it cannot map this process's memory
        self._free: list[_Buffer] = [_Buffer() for _ in range(READS_AT_ONCE)]
        self._reads: dict[int, tuple[_Buffer, int]] = {}
        self._last: _Buffer | None = None
        self._num_reads = 0
        with suppress(zmq.ZMQError, AssertionError):  # nobody answers then
            connect(self._socket, self._endpoint, keys)

    def hello(self, layout: KvLayout, timeout_s: float) -> KvLayout:
        self._socket.send(_wire.encode(Hello(self._instance, layout)))
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            answer = self._receive(left_s)
            if answer is not None and isinstance(answer[0], Welcome):
                if answer[0].problem:
                    raise KvReadError(KvFailure.REFUSED, f"{self._endpoint}: {answer[0].problem}")
                return answer[0].layout
        raise KvReadError(KvFailure.UNREACHABLE, f"{self._endpoint} has not answered in {timeout_s:g} s")

    def read(self, generation: int, group: int, block_ids: IntArray, heads: Heads, num_bytes: int) -> int:
        self._take_back()
        buffer = self._free.pop()
        self._num_reads += 1
        self._reads[self._num_reads] = buffer, num_bytes
        address = buffer.address(num_bytes) if self._shares else None
        self._socket.send(
            _wire.encode(
                Read(
                    self._num_reads, self._instance, generation, group, block_ids, _pack_heads(heads), address
                )
            )
        )
        return self._num_reads

    def poll(self, timeout_s: float) -> tuple[int, ByteArray] | None:
        self._take_back()
        answer = self._receive(timeout_s)
        if answer is None:
            return None
        done, frame = answer
        if not isinstance(done, ReadDone) or done.read_id not in self._reads:
            return None
        buffer, num_bytes = self._reads.pop(done.read_id)
        self._last = buffer
        if done.failure:
            raise KvReadError(KvFailure(done.failure), f"{self._endpoint} gives no blocks")
        self._shares = done.is_in_buffer
        content = buffer.content[:num_bytes] if done.is_in_buffer else np.frombuffer(frame, np.uint8)
        if content.size != num_bytes or checksum(content) != done.checksum:
            raise KvReadError(KvFailure.CORRUPT, f"{self._endpoint} sent other bytes than it had")
        return done.read_id, content

    def release(self, generation: int) -> None:
        self._socket.send(_wire.encode(Release(self._instance, generation)))

    def close(self) -> None:
        self._context.destroy()
        for buffer in (*self._free, *(each for each, _ in self._reads.values())):
            buffer.close()

    def _take_back(self) -> None:
        if self._last is not None:
            self._free.append(self._last)
            self._last = None

    def _receive(self, timeout_s: float) -> tuple[WireMessage, bytes | memoryview] | None:
        if not self._socket.poll(max(0, round(1000 * timeout_s))):
            return None
        first, *rest = self._socket.recv_multipart(copy=False)
        try:
            return _wire.decode(first.bytes), rest[0].buffer if rest else b""
        except ProtocolError as error:
            raise KvReadError(KvFailure.CORRUPT, f"{self._endpoint}: {error}") from None


class _Buffer:
    """Shared memory for one read at a time; it grows as needed."""

    def __init__(self) -> None:
        self._segment: SharedSegment | None = None
        self.content: ByteArray = np.zeros(0, np.uint8)

    def address(self, num_bytes: int) -> SegmentAddress | None:
        """Return the address of at least `num_bytes`. Returns None if the system has no such memory."""
        if self.content.size < num_bytes:
            self.close()
            try:
                self._segment = SharedSegment.create("transfer", max(num_bytes, READ_BYTES))
                self.content = np.frombuffer(self._segment.map(), np.uint8)
            except OSError:
                self.close()
        return None if self._segment is None else self._segment.address

    def close(self) -> None:
        self.content = np.zeros(0, np.uint8)
        if self._segment is not None:
            self._segment.close()
            self._segment = None


def _pack_heads(heads: Heads) -> IntArray:
    return np.array(heads, np.int32).ravel()


def _unpack_heads(packed: IntArray) -> Heads:
    pairs = packed.reshape(-1, 2).tolist()
    return tuple((first, count) for first, count in pairs)
