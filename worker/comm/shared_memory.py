"""SharedMemoryCommunicator: the collectives of ranks on one host, over shared memory."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.native.library import is_available
from ...kernels.shm_collectives import SLOT_BYTES, SharedMemoryCollectives, can_reduce, segment_bytes
from .communicator import Arrival, Arrived, Communicator, RowCounts, nothing
from .torch_distributed import TorchDistributed

# How often a waiting rank checks whether the others are alive.
LIVENESS_CHECK_US = 100_000
# struct flock: type, whence, start, length, process id.
_FLOCK = struct.Struct("hh4xqqi4x")
# Bytes that a rank sends in one round of an all-to-all. Pages that are never written take no memory.
EXCHANGE_BYTES = 4 << 20
# A rank may write a round while others still read the one before, never the one before that.
_NUM_BUFFERS = 2
# The first page of the memory holds a random number, since a process of another host may have the same id.
_TOKEN = struct.Struct("q")

_log = logging.getLogger(__name__)


def join_group(
    rank: int, size: int, host: str, port: int, device: torch.device, timeout_s: float, name: str = ""
) -> Communicator:
    """Join a group as TorchDistributed does, over shared memory if all ranks can map the same memory.

    Raises:
        ConnectionError: a rank did not join within `timeout_s`.
    """
    group = TorchDistributed.join(rank, size, host, port, device, timeout_s, name)
    if device.type != "cpu":
        return group
    try:
        segment = _share_segment(group)
    except ConnectionError:
        group.close()
        raise
    return group if segment is None else SharedMemoryCommunicator(group, *segment, timeout_s)


class SharedMemoryCommunicator:
    """Communicator of ranks that share memory.

    The memory has no name, so the system frees it when the ranks have ended, even if they were killed. Each rank
    locks one byte of the file to show the others that it is alive; the system releases the lock when the rank ends.

    Args:
        group: the same ranks over gloo.
        file: descriptor of the memory's file, opened by this rank.
        timeout_s: how long to wait for the other ranks in each collective.

    Attributes:
        group: carries the sums of other dtypes and the gathers that are too long for the shared memory.

    Raises:
        ConnectionError: from every collective; names the rank that did not arrive.
    """

    def __init__(self, group: TorchDistributed, file: int, memory: mmap.mmap, timeout_s: float) -> None:
        self.rank, self.size = group.rank, group.size
        self.group = group
        self._file = file
        self.timeout_s = timeout_s
        self._collectives: SharedMemoryCollectives | None = SharedMemoryCollectives(
            memory, mmap.PAGESIZE, group.rank, group.size
        )
        # [2, size, EXCHANGE_BYTES], what each rank sends in a round.
        self._buffers = torch.frombuffer(
            memory, dtype=torch.uint8, offset=mmap.PAGESIZE + segment_bytes(group.size)
        ).view(_NUM_BUFFERS, group.size, EXCHANGE_BYTES)
        self._num_rounds = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not can_reduce(tensor):
            return self.group.all_reduce(tensor)
        collectives = self._open
        flat, step = tensor.view(-1), SLOT_BYTES // tensor.element_size()
        for start in range(0, len(flat), step):
            late = collectives.all_reduce(flat[start : start + step], LIVENESS_CHECK_US)
            self._wait("all-reduce", collectives, late)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes > SLOT_BYTES:
            return self.group.all_gather(tensor)
        collectives, tensor = self._open, tensor.contiguous()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._wait("all-gather", collectives, collectives.all_gather(tensor, gathered, LIVENESS_CHECK_US))
        return gathered

    def all_to_all(self, rows: Tensor, counts: RowCounts) -> Arrival:
        if not any(count for own, row in enumerate(counts) for to, count in enumerate(row) if to != own):
            return Arrived(rows)  # every rank keeps its own
        return _Exchange(self, rows, counts)

    def next_buffer(self) -> Tensor:
        """Return what each rank sends in the next round, [size, EXCHANGE_BYTES]."""
        _ = self._open
        self._num_rounds += 1
        return self._buffers[self._num_rounds % _NUM_BUFFERS]

    def barrier(self) -> None:
        self.all_gather(torch.zeros(1))

    def meet(self, timeout_s: float) -> None:
        collectives, own = self._open, torch.zeros(1)
        gathered = own.new_empty((self.size, 1))
        late = collectives.all_gather(own, gathered, LIVENESS_CHECK_US)
        self._wait("meeting", collectives, late, timeout_s)

    def close(self, drop_recordings: Callable[[], object] = nothing) -> None:
        if self._collectives is not None:
            self._collectives.close()
            self._collectives = None
            del self._buffers
            os.close(self._file)
        self.group.close(drop_recordings)

    @property
    def _open(self) -> SharedMemoryCollectives:
        if self._collectives is None:
            raise ConnectionError(f"rank {self.rank} has left the group")
        return self._collectives

    def _wait(
        self,
        operation: str,
        collectives: SharedMemoryCollectives,
        late: int | None,
        timeout_s: float | None = None,
    ) -> None:
        """Wait for the late rank until it arrives, is found dead, or the deadline passes."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while late is not None:
            if time.monotonic() > deadline:
                raise self._failure(operation, late, f"did not arrive within {timeout_s:g} s")
            # A dead rank may have arrived before it ended.
            is_alive = is_locked(self._file, late)
            awaited, late = late, collectives.resume(LIVENESS_CHECK_US if is_alive else 0)
            if late == awaited and not is_alive:
                raise self._failure(operation, late, "has ended")

    def _failure(self, operation: str, late: int, reason: str) -> ConnectionError:
        return ConnectionError(
            f"{operation} of rank {self.rank} with the others of {self.size} failed: rank {late} {reason}"
        )


class _Exchange:
    """An all-to-all in rounds, the first of which is written at once: others may read while this rank computes."""

    def __init__(self, comm: SharedMemoryCommunicator, rows: Tensor, counts: RowCounts) -> None:
        self._comm, self._rows = comm, rows
        row_bytes = rows[:1].nbytes or rows.new_empty(1, *rows.shape[1:]).nbytes
        # Offsets in bytes of what each rank sends to each, [size][size + 1]; a rank sends itself nothing.
        self._bounds = [
            list(accumulate((0 if to == own else n * row_bytes for to, n in enumerate(row)), initial=0))
            for own, row in enumerate(counts)
        ]
        received = [row[comm.rank] for row in counts]
        self._out = rows.new_empty(sum(received), *rows.shape[1:])
        self._starts = [start * row_bytes for start in accumulate(received, initial=0)]
        before = sum(counts[comm.rank][: comm.rank])
        own = counts[comm.rank][comm.rank]
        self._out[sum(received[: comm.rank]) :][:own] = rows[before : before + own]
        others = torch.cat((rows[:before], rows[before + own :])) if own else rows
        self._sent = others.contiguous().view(-1).view(torch.uint8)
        self._num_rounds = -(-max(bounds[-1] for bounds in self._bounds) // EXCHANGE_BYTES)
        self._buffer = self._write(0)

    def wait(self) -> Tensor:
        for index in range(self._num_rounds):
            self._comm.barrier()
            self._read(index)
            if index + 1 < self._num_rounds:
                self._buffer = self._write(index + 1)
        return self._out

    def _write(self, index: int) -> Tensor:
        buffer, part = self._comm.next_buffer(), self._sent[index * EXCHANGE_BYTES :][:EXCHANGE_BYTES]
        buffer[self._comm.rank, : len(part)] = part
        return buffer

    def _read(self, index: int) -> None:
        """Copy what this round has for this rank."""
        rank, out = self._comm.rank, self._out.view(-1).view(torch.uint8)
        first = index * EXCHANGE_BYTES
        for sender, bounds in enumerate(self._bounds):
            start, end = max(bounds[rank], first), min(bounds[rank + 1], first + EXCHANGE_BYTES)
            if start < end:
                place = self._starts[sender] + start - bounds[rank]
                out[place : place + end - start] = self._buffer[sender, start - first : end - first]


def _share_segment(group: TorchDistributed) -> tuple[int, mmap.mmap] | None:
    """Return this rank's file and map of rank 0's memory. Returns None on all ranks if one of them cannot map it."""
    with ExitStack() as opened:
        num_bytes = _num_bytes(group.size)
        file = create_file("quire-collectives", num_bytes, opened) if group.rank == 0 else None
        number = -1 if file is None else file
        own = torch.tensor([host_id(), os.getpid(), number, secrets.randbits(62)])
        all_ranks = group.all_gather(own)
        _, process, number, token = all_ranks[0].tolist()
        if (all_ranks[:, 0] != all_ranks[0, 0]).any():
            return None  # several hosts: process ids of rank 0 are not valid on the others
        if group.rank == 0:
            memory = None if file is None else map_locked(file, num_bytes, group.rank)
            if memory is not None:
                memory[: _TOKEN.size] = _TOKEN.pack(token)
        group.barrier()
        if group.rank != 0:
            file = open_file(process, number, opened)
            memory = None if file is None else map_locked(file, num_bytes, group.rank)
        is_same = memory is not None and _TOKEN.unpack_from(memory)[0] == token
        if group.all_gather(torch.tensor([is_same])).all() and file is not None and memory is not None:
            opened.pop_all()
            return file, memory
    _log.warning("rank %d: not all ranks can map the same memory; using gloo for the collectives", group.rank)
    return None


def _num_bytes(size: int) -> int:
    """Return the bytes of the memory of `size` ranks."""
    return mmap.PAGESIZE + segment_bytes(size) + _NUM_BUFFERS * size * EXCHANGE_BYTES


def host_id() -> int:
    """Return a number that is equal for processes of one host and one pid namespace."""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.stat("/proc/self/ns/pid")
        seen = b"%b %d %d" % (boot_id, namespace.st_dev, namespace.st_ino)
        return int.from_bytes(sha256(seen).digest()[:7], "little")
    return secrets.randbits(56)


def create_file(name: str, num_bytes: int, opened: ExitStack) -> int | None:
    """Return a new file of shared memory, to be closed with `opened`. Returns None if it cannot be created."""
    if not is_available():
        return None
    try:
        file = os.memfd_create(name)
        opened.callback(os.close, file)
        os.ftruncate(file, num_bytes)
    except (AttributeError, OSError):  # not Linux, or no memory
        return None
    return file


def open_file(process: int, number: int, opened: ExitStack) -> int | None:
    """Open another process's file, to be closed with `opened`: a lock belongs to the open file description.

    Returns None if it cannot be opened here.
    """
    if number < 0 or not is_available():
        return None
    try:
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    except OSError:  # another host or pid namespace
        return None
    opened.callback(os.close, file)
    return file


def map_locked(file: int, num_bytes: int, rank: int) -> mmap.mmap | None:
    """Map a file and lock this rank's byte of it. Returns None if that fails."""
    try:
        if os.fstat(file).st_size != num_bytes:
            return None
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
        return mmap.mmap(file, num_bytes)
    except OSError:
        return None


def is_locked(file: int, rank: int) -> bool:
    """Return whether another rank, which has locked its byte of a file, is alive."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, request))[0]
    return kind != fcntl.F_UNLCK
