"""FromNixl: blocks that this rank reads from the lender's registered memory."""

from __future__ import annotations

import time
from collections import deque

from ...proto.kv_transfer import KvFailure
from .kv_blocks import KvBlocks
from .line import BlockRead, Line
from .messages import Check, KvReadError, ReadDone, pack_heads
from .nixl import NixlEnd, NixlError, NixlMemory, NixlRead
from .planes import Planes

# Time between two looks at reads that have begun; NIXL has no call that waits.
_POLL_S = 0.001
# Bytes of a read: many for one look, few for a slow network, on which a peer must not count as silent.
_READ_BYTES = 16 << 20


class FromNixl:
    """Reads the lender's memory, and then compares checksums with the lender's rank.

    As with memory that is mapped, the lease is in effect when the first read begins and after each one, so that the
    content did not change meanwhile. Unlike there the bytes pass a network: the lender's rank computes the checksum
    of what it has while the lease is in effect, and this one that of what has arrived.
    """

    read_bytes = _READ_BYTES

    def __init__(self, line: Line, blocks: KvBlocks, nixl: NixlEnd, memory: NixlMemory) -> None:
        self._line, self._blocks, self._nixl, self._memory = line, blocks, nixl, memory
        self._planes = Planes.unpack(memory.planes)
        self._waiting = deque[BlockRead]()
        self._granted = 0  # generation of the lease that was in effect when asked
        self._begun = dict[int, tuple[BlockRead, NixlRead]]()
        self._checksums = dict[int, int]()  # of what has arrived, until the lender's is known

    def begin(self, read: BlockRead) -> None:
        if self._granted == read.generation:
            self._start(read)
            return
        if not self._waiting:
            check = Check(0, self._line.instance, read.generation, read.sources, waits=True)
            self._line.send(check)
        self._waiting.append(read)

    def poll(self, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_arrived()
            left_s = max(0.0, deadline - time.monotonic())
            answer = self._line.receive(min(left_s, _POLL_S) if self._begun else left_s)
            if answer is not None and isinstance(answer[0], ReadDone):
                done = self._take(answer[0])
                if done is not None:
                    return done
            elif not left_s:
                return None

    def close(self) -> None:
        self._waiting.clear()
        self._nixl.end(self._memory, [begun for _, begun in self._begun.values()])
        self._begun.clear()

    def _start(self, read: BlockRead) -> None:
        self._blocks.await_written()
        try:
            pieces = self._blocks.pieces(self._planes, 0, read.group, read.heads, read.sources, read.targets)
            self._begun[read.read_id] = read, self._nixl.begin(self._memory, *pieces)
        except (NixlError, ValueError) as error:
            raise self._failure(error) from None

    def _check_arrived(self) -> None:
        """Ask for the checksums of what has arrived, and compute them here meanwhile."""
        try:
            arrived = [read for read, begun in self._begun.values() if begun.poll()]
        except NixlError as error:
            raise self._failure(error) from None
        for read in arrived:
            _, begun = self._begun.pop(read.read_id)
            begun.free()
            heads = pack_heads(read.heads)
            self._line.send(
                Check(
                    read.read_id, self._line.instance, read.generation, read.sources, False, read.group, heads
                )
            )
            self._checksums[read.read_id] = self._blocks.checksum(read.group, read.targets, read.heads)

    def _take(self, done: ReadDone) -> int | None:
        """Take an answer; return the read whose bytes are those of the lender."""
        self._line.check(done)
        if done.read_id == 0 and self._waiting:
            self._granted = self._waiting[0].generation
            while self._waiting:
                self._start(self._waiting.popleft())
        if done.read_id not in self._checksums:
            return None
        if self._checksums.pop(done.read_id) != done.checksum:
            raise KvReadError(KvFailure.CORRUPT, f"{self._line.endpoint} has other bytes than have arrived")
        return done.read_id

    def _failure(self, error: Exception) -> KvReadError:
        self._nixl.forget(self._memory)
        return KvReadError(KvFailure.UNREACHABLE, f"{self._line.endpoint} cannot be read by NIXL: {error}")
