"""SharedMemory: the collectives of ranks on one host, over memory that they share."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import struct
import time
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.native.ops import ops
from ...kernels.shm_collectives import SLOT_BYTES, SharedMemoryCollectives, can_sum, segment_bytes
from .communicator import Communicator, TorchDistributed

# How often a rank that waits looks whether the others are alive.
_LOOK_US = 100_000
# struct flock: type, whence, start, length, process id.
_FLOCK = struct.Struct("hh4xqqi4x")
# The memory begins with a page that holds a random number: another host's process may have the same ids.
_TOKEN = struct.Struct("q")

_log = logging.getLogger(__name__)


def join(rank: int, size: int, host: str, port: int, backend: str, timeout_s: float) -> Communicator:
    """Joins a group as TorchDistributed does; where all ranks can map the same memory, they meet there.

    Raises:
        ConnectionError: not every rank came in time.
    """
    group = TorchDistributed(rank, size, host, port, backend, timeout_s)
    if backend != "gloo":
        return group
    try:
        segment = _share_segment(group)
    except ConnectionError:
        group.close()
        raise
    return group if segment is None else SharedMemory(group, *segment, timeout_s)


class SharedMemory:
    """A group whose ranks share memory.

    The memory has no name, so nothing is left of it when its ranks are gone, however they went. Each rank holds
    a lock on a byte of its file, by which the others see that it lives; the system releases it when a rank is killed.

    Args:
        file: of the memory, opened by this rank.
        timeout_s: how long to wait for the other ranks in each collective.

    Attributes:
        group: the same ranks over gloo, which has the collectives of other dtypes and of long gathers.

    Raises:
        ConnectionError: from every collective; names the rank that did not come.
    """

    def __init__(self, group: TorchDistributed, file: int, memory: mmap.mmap, timeout_s: float) -> None:
        self.rank, self.size = group.rank, group.size
        self.group = group
        self._file = file
        self._timeout_s = timeout_s
        self._collectives: SharedMemoryCollectives | None = SharedMemoryCollectives(
            memory, mmap.PAGESIZE, group.rank, group.size
        )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not can_sum(tensor):
            return self.group.all_reduce(tensor)
        exchange = self._open
        flat, step = tensor.view(-1), SLOT_BYTES // tensor.element_size()
        for start in range(0, len(flat), step):
            self._finish("all-reduce", exchange, exchange.sum(flat[start : start + step], _LOOK_US))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes > SLOT_BYTES:
            return self.group.all_gather(tensor)
        exchange, tensor = self._open, tensor.contiguous()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._finish("all-gather", exchange, exchange.gather(tensor, gathered, _LOOK_US))
        return gathered

    def barrier(self) -> None:
        self.all_gather(torch.zeros(1))

    def close(self) -> None:
        if self._collectives is not None:
            self._collectives.leave()
            self._collectives = None
            os.close(self._file)
        self.group.close()

    @property
    def _open(self) -> SharedMemoryCollectives:
        if self._collectives is None:
            raise ConnectionError(f"rank {self.rank} has left the group")
        return self._collectives

    def _finish(self, what: str, exchange: SharedMemoryCollectives, late: int | None) -> None:
        """Waits on for the rank that is late, as long as it lives and the time lasts."""
        deadline = time.monotonic() + self._timeout_s
        while late is not None:
            if time.monotonic() > deadline:
                raise self._failure(what, late, f"did not come in {self._timeout_s:g} s")
            # A rank that is gone may have come before it went.
            is_alive = _is_locked(self._file, late)
            awaited, late = late, exchange.resume(_LOOK_US if is_alive else 0)
            if late == awaited and not is_alive:
                raise self._failure(what, late, "is gone")

    def _failure(self, what: str, late: int, reason: str) -> ConnectionError:
        return ConnectionError(
            f"{what} of rank {self.rank} with the others of {self.size} failed: rank {late} {reason}"
        )


def _share_segment(group: TorchDistributed) -> tuple[int, mmap.mmap] | None:
    """This rank's file and map of the memory that rank 0 makes; None on all ranks if one of them cannot have it."""
    with ExitStack() as opened:
        file = _create_segment(group.size, opened) if group.rank == 0 else None
        number = -1 if file is None else file
        announced = torch.tensor([_host(), os.getpid(), number, secrets.randbits(62)])
        everyone = group.all_gather(announced)
        _, process, number, token = everyone[0].tolist()
        if (everyone[:, 0] != everyone[0, 0]).any():
            return None  # several hosts: the same process id is another process there
        if group.rank == 0:
            memory = None if file is None else _map_segment(file, group)
            if memory is not None:
                memory[: _TOKEN.size] = _TOKEN.pack(token)
        group.barrier()
        if group.rank != 0:
            file = _open_segment(process, number, opened)
            memory = None if file is None else _map_segment(file, group)
        is_same = memory is not None and _TOKEN.unpack_from(memory)[0] == token
        if group.all_gather(torch.tensor([is_same])).all() and file is not None and memory is not None:
            opened.pop_all()
            return file, memory
    _log.warning("rank %d cannot share memory with all the others; gloo carries the collectives", group.rank)
    return None


def _host() -> int:
    """Equal for processes that see each other by their ids: those of one host and one pid namespace."""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = os.stat("/proc/self/ns/pid")
        seen = b"%b %d %d" % (boot_id, namespace.st_dev, namespace.st_ino)
        return int.from_bytes(sha256(seen).digest()[:7], "little")
    return secrets.randbits(56)


def _create_segment(size: int, opened: ExitStack) -> int | None:
    """The file of a new segment, which is closed with `opened`; None where there can be none."""
    if ops() is None:
        return None
    try:
        file = os.memfd_create("quire-collectives")
        opened.callback(os.close, file)
        os.ftruncate(file, mmap.PAGESIZE + segment_bytes(size))
    except (AttributeError, OSError):  # not Linux, or no memory
        return None
    return file


def _open_segment(process: int, number: int, opened: ExitStack) -> int | None:
    """Rank 0's file, opened anew: a lock belongs to who opened the file. It is closed with `opened`."""
    if number < 0 or ops() is None:
        return None
    try:
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    except OSError:  # another host, or another view of the processes
        return None
    opened.callback(os.close, file)
    return file


def _map_segment(file: int, group: TorchDistributed) -> mmap.mmap | None:
    """Maps the memory and locks this rank's byte."""
    length = mmap.PAGESIZE + segment_bytes(group.size)
    try:
        if os.fstat(file).st_size != length:
            return None
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, group.rank, 1, 0))
        return mmap.mmap(file, length)
    except OSError:
        return None


def _is_locked(file: int, rank: int) -> bool:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK
