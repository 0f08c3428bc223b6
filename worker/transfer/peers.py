"""A reader's connection to one rank of another replica, and the ways by which blocks come.

By NIXL, if both ranks have it (`--kv-transport nixl`). Otherwise, in order of preference: the reader copies from the
lender's memory, which it maps, between ranks on CPUs of one host; the lender copies into memory that the reader
shares, on the same host; it sends them over a stream, encrypted, between hosts; they follow its answers as frames,
where nothing else works.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Protocol

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.kv_layout import KvLayout
from ...proto.kv_transfer import KvFailure
from ...proto.transport.network import CurveKeys
from ..memory.checksum import checksum
from ..memory.shared_segment import SegmentAddress, SharedSegment
from .kv_blocks import ByteArray, Heads, KvBlocks, MappedBlocks
from .line import BlockRead, Line
from .messages import (
    MAPPED_READ_BYTES,
    MAX_FRAME_BYTES,
    READ_BYTES,
    READS_AT_ONCE,
    Check,
    Hello,
    KvReadError,
    Read,
    ReadDone,
    Release,
    StreamOffer,
    Welcome,
    pack_heads,
    wire,
)
from .nixl import NixlEnd
from .nixl_way import FromNixl
from .sealed_port import connect_stream
from .sealed_stream import SealedStream

# A request of a few kB that cannot be sent for so long will not be.
_SEND_TIMEOUT_S = 2.0


class _Way(Protocol):
    """A way by which blocks come. For one thread.

    Attributes:
        read_bytes: what a read should have.
    """

    read_bytes: int

    def begin(self, read: BlockRead) -> None: ...

    def poll(self, timeout_s: float) -> int | None:
        """Return the number of a read whose blocks are there; None if there is none yet. Raises KvReadError."""
        ...

    def close(self) -> None: ...


class Peer:
    """A KvPeer.

    Args:
        description: by the other rank's transport.
        blocks: into which reads go.
        nixl: this rank's end of reads by NIXL; None for none.
    """

    def __init__(
        self, description: str, keys: CurveKeys | None, blocks: KvBlocks, nixl: NixlEnd | None = None
    ) -> None:
        self._line = Line(description, keys)
        self._blocks, self._nixl = blocks, nixl
        self._way: _Way | None = None
        self._num_reads = 0

    @property
    def read_bytes(self) -> int:
        assert self._way is not None, "hello must be called before the first read"
        return self._way.read_bytes

    def hello(self, layout: KvLayout, timeout_s: float) -> KvLayout:
        probe = _Buffer()
        try:
            self._line.send(
                Hello(
                    self._line.instance, layout, probe.address(READ_BYTES), wants_nixl=self._nixl is not None
                )
            )
            deadline = time.monotonic() + timeout_s
            while (left_s := deadline - time.monotonic()) > 0:
                answer = self._line.receive(left_s)
                if answer is not None and isinstance(answer[0], Welcome):
                    break
            else:
                raise KvReadError(
                    KvFailure.UNREACHABLE, f"{self._line.endpoint} has not answered in {timeout_s:g} s"
                )
        finally:
            probe.close()
        welcome = answer[0]
        if welcome.problem:
            raise KvReadError(KvFailure.REFUSED, f"{self._line.endpoint}: {welcome.problem}")
        self._way = self._choose(welcome)
        return welcome.layout

    def _choose(self, welcome: Welcome) -> _Way:
        if self._nixl is not None:
            registered = self._nixl.readable(welcome.nixl, self._line.endpoint)
            if registered is not None:
                return FromNixl(self._line, self._blocks, self._nixl, registered)
        if welcome.blocks is not None and not self._blocks.are_on_gpu:
            with suppress(OSError, ValueError):  # it is on another host, or of another user
                return _FromMemory(self._line, self._blocks, MappedBlocks(welcome.blocks))
        if not welcome.maps_buffer and welcome.stream is not None:
            stream = _connect_stream(self._line.endpoint, welcome.stream)
            if stream is not None:
                return _FromStream(self._line, self._blocks, stream)
        return _FromAnswers(self._line, self._blocks, shares=welcome.maps_buffer)

    def read(
        self, generation: int, group: int, sources: IntArray, targets: IntArray, heads: Heads, num_bytes: int
    ) -> int:
        assert self._way is not None, "hello must be called before the first read"
        self._num_reads += 1
        self._way.begin(BlockRead(self._num_reads, generation, group, sources, targets, heads, num_bytes))
        return self._num_reads

    def poll(self, timeout_s: float) -> int | None:
        assert self._way is not None, "hello must be called before the first read"
        return self._way.poll(timeout_s)

    def release(self, generation: int) -> None:
        self._line.send(Release(self._line.instance, generation))

    def close(self) -> None:
        if self._way is not None:
            self._way.close()
        self._line.close()


class _FromMemory:
    """Copies from the lender's memory, and asks after each copy whether the lease was still in effect.

    It asks before the first one, too: a lease that is in effect then and after a copy was so meanwhile, since its
    number is not used again.
    """

    read_bytes = MAPPED_READ_BYTES

    def __init__(self, line: Line, blocks: KvBlocks, mapped: MappedBlocks) -> None:
        self._line, self._blocks, self._mapped = line, blocks, mapped
        self._waiting = deque[BlockRead]()
        self._granted = 0  # generation of the lease that was in effect when asked

    def begin(self, read: BlockRead) -> None:
        if not self._waiting and self._granted != read.generation:
            self._ask(read, 0)
        self._waiting.append(read)

    def poll(self, timeout_s: float) -> int | None:
        if self._waiting and self._waiting[0].generation == self._granted:
            self._copy(self._waiting.popleft())
        answer = self._line.receive(0.0 if self._waiting and self._granted else timeout_s)
        if answer is None or not isinstance(answer[0], ReadDone):
            return None
        done = answer[0]
        self._line.check(done)
        if done.read_id == 0 and self._waiting:
            self._granted = self._waiting[0].generation
        return done.read_id or None

    def _copy(self, read: BlockRead) -> None:
        try:
            self._blocks.copy_from(self._mapped, read.group, read.heads, read.sources, read.targets)
        except ValueError as error:
            raise KvReadError(KvFailure.UNREACHABLE, f"{self._line.endpoint}: {error}") from None
        self._ask(read, read.read_id)

    def _ask(self, read: BlockRead, number: int) -> None:
        waits = number == 0
        self._line.send(Check(number, self._line.instance, read.generation, read.sources, waits))

    def close(self) -> None:
        self._waiting.clear()


class _FromAnswers:
    """Has the lender copy into memory that this process shares, or send the bytes with its answers."""

    read_bytes = READ_BYTES

    def __init__(self, line: Line, blocks: KvBlocks, *, shares: bool) -> None:
        self._line, self._blocks, self._shares = line, blocks, shares
        self._free = [_Buffer() for _ in range(READS_AT_ONCE)]
        self._reads: dict[int, tuple[BlockRead, _Buffer]] = {}

    def begin(self, read: BlockRead) -> None:
        buffer = self._free.pop()
        self._reads[read.read_id] = read, buffer
        address = buffer.address(read.num_bytes) if self._shares else None
        self._line.send(_request(self._line, read, address))

    def poll(self, timeout_s: float) -> int | None:
        answer = self._line.receive(timeout_s)
        if answer is None:
            return None
        done, frame = answer
        if not isinstance(done, ReadDone) or done.read_id not in self._reads:
            return None
        read, buffer = self._reads.pop(done.read_id)
        self._free.append(buffer)
        self._line.check(done)
        content = buffer.content[: read.num_bytes] if done.is_in_buffer else np.frombuffer(frame, np.uint8)
        if content.size != read.num_bytes or checksum(content) != done.checksum:
            raise KvReadError(KvFailure.CORRUPT, f"{self._line.endpoint} sent other bytes than it had")
        self._blocks.scatter(read.group, read.targets, read.heads, content)
        return done.read_id

    def close(self) -> None:
        for buffer in (*self._free, *(each for _, each in self._reads.values())):
            buffer.close()


class _FromStream:
    """Has the lender send the bytes over a stream, which authenticates them."""

    read_bytes = READ_BYTES

    def __init__(self, line: Line, blocks: KvBlocks, stream: SealedStream) -> None:
        self._line, self._blocks, self._stream = line, blocks, stream
        self._reads = deque[BlockRead]()
        self._is_answered = False  # the bytes of the first read are next

    def begin(self, read: BlockRead) -> None:
        self._reads.append(read)
        try:
            self._stream.send(wire.encode(_request(self._line, read, None)), _SEND_TIMEOUT_S)
        except OSError as error:
            raise KvReadError(KvFailure.UNREACHABLE, f"{self._line.endpoint}: {error}") from None

    def poll(self, timeout_s: float) -> int | None:
        try:
            frame = self._stream.receive(timeout_s)
        except OSError as error:
            raise KvReadError(KvFailure.UNREACHABLE, f"{self._line.endpoint}: {error}") from None
        except ValueError as error:
            raise KvReadError(KvFailure.CORRUPT, f"{self._line.endpoint}: {error}") from None
        if frame is None:
            return None
        if not self._is_answered:
            done = self._line.decode(bytes(frame))
            if not isinstance(done, ReadDone) or not self._reads or done.read_id != self._reads[0].read_id:
                raise KvReadError(KvFailure.CORRUPT, f"{self._line.endpoint} answers something else")
            self._line.check(done)
            self._is_answered = True
            return None
        read, self._is_answered = self._reads.popleft(), False
        if len(frame) != read.num_bytes:
            raise KvReadError(KvFailure.CORRUPT, f"{self._line.endpoint} sent other bytes than it had")
        self._blocks.scatter(read.group, read.targets, read.heads, np.frombuffer(frame, np.uint8))
        return read.read_id

    def close(self) -> None:
        self._stream.close()


def _request(line: Line, read: BlockRead, buffer: SegmentAddress | None) -> Read:
    heads = pack_heads(read.heads)
    return Read(read.read_id, line.instance, read.generation, read.group, read.sources, heads, buffer)


def _connect_stream(endpoint: str, offer: StreamOffer) -> SealedStream | None:
    """Return a stream to a lender; None if it cannot be connected."""
    return connect_stream(
        endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]"), offer, MAX_FRAME_BYTES
    )


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
