"""KvTransport: how ranks of different replicas read each other's blocks.

A rank registers its blocks, describes where they are served, and connects to peers by their descriptions. A peer's
reads are answered in order; `poll` returns those that are done.

`ZmqTransport` has its messages on ZeroMQ: ipc on one host, tcp with the fleet's keys between hosts. How the bytes
come is agreed at the hello (see `peers`). Streams have a port of their own, whose connections are admitted by a token
and encrypted with a key that both come over the messages' channel.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Protocol

import numpy as np
import zmq

from ...proto.block_tables import IntArray
from ...proto.errors import ProtocolError
from ...proto.kv_layout import KvLayout
from ...proto.kv_transfer import KvFailure
from ...proto.transport.network import CurveGuard, CurveKeys, bind
from ...proto.transport.wakeup import Wakeup
from ..memory.checksum import checksum
from ..memory.shared_segment import SegmentAddress, SharedSegment
from .kv_blocks import ByteArray, Heads, KvBlocks
from .messages import (
    MAX_FRAME_BYTES,
    Check,
    Hello,
    Read,
    ReadDone,
    Release,
    Welcome,
    WireMessage,
    unpack_heads,
    wire,
)
from .nixl import NixlEnd, open_nixl
from .peers import Peer
from .sealed_port import SealedPort
from .sealed_stream import SealedStream

# How long a server waits for a lease that its plan has yet to bring.
GRANT_PATIENCE_S = 2.0
# Segments of readers that a server keeps mapped, and the time without a read after which one is not any more: its
# reader may have died, and a mapping keeps the memory.
MAX_MAPPED = 64
MAPPED_S = 5.0
# A stream whose reader takes no bytes for so long is closed.
_SEND_TIMEOUT_S = 5.0
# A stream without a request for so long is closed.
_IDLE_TIMEOUT_S = 30.0

_log = logging.getLogger(__name__)


class KvPeer(Protocol):
    """A connection to one rank of another replica. For one thread."""

    @property
    def read_bytes(self) -> int:
        """The bytes that a read should have, after `hello`."""
        ...

    def hello(self, layout: KvLayout, timeout_s: float) -> KvLayout:
        """Return the peer's layout.

        Raises:
            KvReadError: it does not answer, or has a layout with which no blocks can be exchanged.
        """
        ...

    def read(
        self, generation: int, group: int, sources: IntArray, targets: IntArray, heads: Heads, num_bytes: int
    ) -> int:
        """Begin to read heads of blocks into this rank's; return the read's number, READS_AT_ONCE at a time."""
        ...

    def poll(self, timeout_s: float) -> int | None:
        """Return a read that is done, whose blocks have their content; None if none is yet.

        Raises:
            KvReadError: the lease has ended, or the bytes are not those that were sent. What the targets have is
                undefined then.
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
        """Serve blocks from now on, those of leases, and read into them."""
        ...

    def describe(self) -> str:
        """Return where this rank serves, for `connect` of another one."""
        ...

    def connect(self, description: str) -> KvPeer: ...

    def close(self) -> None:
        """Serve no more. Safe to call twice."""
        ...


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
    """A KvTransport over ZeroMQ, with a thread that serves, and one for each stream.

    Args:
        endpoint: where to bind, ipc or tcp.
        keys: of the fleet, over tcp.
        leases: which blocks may be read.
        run: runs the body of a thread, with its device current.
        has_nixl: blocks come and leave by NIXL, where the other rank has it too.
    """

    def __init__(
        self,
        endpoint: str,
        keys: CurveKeys | None,
        leases: LeaseTable,
        run: Callable[[Callable[[], None]], None] = lambda body: body(),
        *,
        has_nixl: bool = False,
    ) -> None:
        self._has_nixl = has_nixl
        self._nixl: NixlEnd | None = None
        self._keys, self._leases, self._run = keys, leases, run
        self._instance = secrets.token_hex(8)
        self._blocks: KvBlocks | None = None
        # name |-> mapped memory of a reader, and when it was last used; the latest last
        self._segments: dict[str, tuple[ByteArray, float]] = {}
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
        self._streams = None if keys is None else _open_streams(self._endpoint, self._serve_stream, run)

    def register(self, blocks: KvBlocks) -> None:
        self._blocks = blocks
        self._nixl = open_nixl(blocks) if self._has_nixl else None
        self._thread = threading.Thread(target=self._run, args=(self._serve,), name="kv-server", daemon=True)
        self._thread.start()

    def describe(self) -> str:
        return f"{self._endpoint}#{self._instance}"

    def connect(self, description: str) -> KvPeer:
        assert self._blocks is not None, "register must be called before connect"
        return Peer(description, self._keys, self._blocks, self._nixl)

    def close(self) -> None:
        if self._context.closed:
            return
        self._stop.wake()
        if self._streams is not None:
            self._streams.close()
        if self._thread is not None:
            self._thread.join()
        self._stop.close()
        if self._guard is not None:
            self._guard.close()
        self._context.destroy(linger=0)
        self._segments.clear()
        if self._nixl is not None:
            self._nixl.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stop.socket, zmq.POLLIN)
        while self._stop.socket not in (
            ready := dict(poller.poll(round(1000 * MAPPED_S) if self._segments else None))
        ):
            self._unmap_unused()
            if self._router not in ready:
                continue
            peer, *frames = self._router.recv_multipart()
            try:
                self._handle(peer, wire.decode(frames[-1] if frames else b""))
            except ProtocolError as error:
                _log.warning("ignored a message of a rank that reads KV: %s", error)
            except zmq.ZMQError as error:
                _log.warning("a rank that reads KV is gone: %s", error)
            except Exception:  # other readers are served
                _log.exception("a message of a rank that reads KV could not be answered")

    def _handle(self, peer: bytes, message: WireMessage) -> None:
        assert self._blocks is not None
        match message:
            case Hello():
                self._send(peer, self._welcome(message, self._blocks))
            case Read():
                self._answer(peer, message, self._blocks)
            case Check():
                self._send(peer, self._check(message, self._blocks))
            case Release() if message.instance == self._instance:
                self._leases.on_release(message.generation)

    def _welcome(self, hello: Hello, blocks: KvBlocks) -> Welcome:
        problem = "; ".join(blocks.layout.whole.differences(hello.layout.whole))
        if hello.instance != self._instance:
            problem = "the rank that lent the blocks has ended"
        if problem:
            return Welcome(blocks.layout, problem)
        return Welcome(
            blocks.layout,
            "",
            maps_buffer=hello.buffer is not None and _can_open(hello.buffer),
            blocks=blocks.map,
            stream=None if self._streams is None else self._streams.offer(),
            nixl=None if self._nixl is None or not hello.wants_nixl else self._nixl.memory,
        )

    def _check(self, check: Check, blocks: KvBlocks) -> ReadDone:
        patience_s = GRANT_PATIENCE_S if check.waits else 0.0
        is_valid, content_sum = self._covers(check, patience_s), 0
        if is_valid and check.waits:
            blocks.await_written()
        if is_valid and check.heads.size:
            content_sum = blocks.checksum(check.group, check.block_ids, unpack_heads(check.heads))
            is_valid = self._covers(check, 0.0)
        if is_valid:
            self._leases.on_read(check.generation)
        failure = "" if is_valid else KvFailure.STALE
        return ReadDone(check.read_id, failure, content_sum, is_in_buffer=False)

    def _covers(self, read: Read | Check, patience_s: float) -> bool:
        """Return whether the lease of what is read is in effect."""
        return read.instance == self._instance and self._leases.covers(
            read.generation, read.block_ids, patience_s
        )

    def _answer(self, peer: bytes, read: Read, blocks: KvBlocks) -> None:
        shared = None

        def take(num_bytes: int) -> ByteArray:
            nonlocal shared
            shared = self._map(read.buffer, num_bytes)
            return np.empty(num_bytes, np.uint8) if shared is None else shared[:num_bytes]

        content = self._copy_out(read, blocks, take)
        if isinstance(content, KvFailure):
            self._send(peer, ReadDone(read.read_id, content, 0, is_in_buffer=False))
            return
        done = ReadDone(read.read_id, "", checksum(content), is_in_buffer=shared is not None)
        self._send(peer, done, None if shared is not None else content)

    def _copy_out(
        self, read: Read, blocks: KvBlocks, take: Callable[[int], ByteArray]
    ) -> ByteArray | KvFailure:
        """Copy what is to be read into memory that `take` gives; fail if the lease was not in effect all the time."""
        is_valid = self._covers(read, GRANT_PATIENCE_S)
        heads = unpack_heads(read.heads)
        if not is_valid or not 0 <= read.group < len(blocks.layout.transferred_groups):
            return KvFailure.STALE
        num_bytes = len(read.block_ids) * blocks.block_bytes(read.group, heads)
        if num_bytes > MAX_FRAME_BYTES:
            return KvFailure.REFUSED
        content = take(num_bytes)
        blocks.gather(read.group, read.block_ids, heads, content)
        if not self._covers(read, 0.0):
            return KvFailure.STALE
        self._leases.on_read(read.generation)
        return content

    def _serve_stream(self, stream: SealedStream) -> None:
        """Answer the requests of a stream until it ends."""
        buffer = np.empty(0, np.uint8)

        def take(num_bytes: int) -> ByteArray:
            nonlocal buffer
            if buffer.size < num_bytes:
                buffer = np.empty(num_bytes, np.uint8)
            return buffer[:num_bytes]

        while (frame := stream.receive(_IDLE_TIMEOUT_S)) is not None:
            read = wire.decode(bytes(frame))
            if not isinstance(read, Read) or self._blocks is None:
                return
            content = self._copy_out(read, self._blocks, take)
            failure = content if isinstance(content, KvFailure) else ""
            stream.send(wire.encode(ReadDone(read.read_id, failure, 0, is_in_buffer=False)), _SEND_TIMEOUT_S)
            if not isinstance(content, KvFailure):
                stream.send(content.data, _SEND_TIMEOUT_S)

    def _map(self, address: SegmentAddress | None, num_bytes: int) -> ByteArray | None:
        """Return a reader's shared memory; None if it has none that this process can map."""
        if address is None or address.num_bytes < num_bytes:
            return None
        known = self._segments.pop(address.name, None)
        if known is None:
            try:
                with closing(SharedSegment.open(address)) as segment:
                    content = np.frombuffer(segment.map(), np.uint8)
            except OSError:  # on another host, of another user, or there is no memory
                return None
            if len(self._segments) >= MAX_MAPPED:
                del self._segments[next(iter(self._segments))]
        else:
            content = known[0]
        self._segments[address.name] = content, time.monotonic()
        return content

    def _unmap_unused(self) -> None:
        """Unmap the memory of readers that have not read for a while."""
        used_since = time.monotonic() - MAPPED_S
        for name, (_, used_at) in list(self._segments.items()):
            if used_at >= used_since:
                break
            del self._segments[name]

    def _send(self, peer: bytes, message: WireMessage, content: ByteArray | None = None) -> None:
        frames: list[Any] = [peer, wire.encode(message)]
        if content is not None:
            frames.append(content)
        self._router.send_multipart(frames, copy=content is None)


def _can_open(address: SegmentAddress) -> bool:
    """Return whether this process can map the memory of a reader."""
    try:
        SharedSegment.open(address).close()
    except OSError:
        return False
    return True


def _open_streams(
    endpoint: str, serve: Callable[[SealedStream], None], run: Callable[[Callable[[], None]], None]
) -> SealedPort | None:
    """Return the port for streams at an endpoint's address; None, and a warning, if there is none."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return SealedPort(host, serve, MAX_FRAME_BYTES, run)
    except OSError as error:
        _log.warning(
            "blocks leave %s over ZeroMQ, which is slower: no port can be opened: %s", endpoint, error
        )
        return None
