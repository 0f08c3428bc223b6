"""ProcessMemory: blocks of another process of this host, read in one copy by the system (process_vm_readv).

Nothing has to be shared beforehand, so that blocks stay in ordinary memory, on huge pages if the system has some. The
system lets a process read those of the same user that it may also debug; where it does not, or the other process is
on another host, `open` tells.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

# Pairs of addresses that one call takes at most (IOV_MAX of Linux).
_MAX_PIECES = 1024
_PR_SET_PTRACER = 0x59616D61

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Addresses of something in a process's memory.

    Attributes:
        proof: random bytes, which are at `proof_address`: another process of that number has others there.
        places: int64 numbers that only the owner and its reader understand.
    """

    pid: int
    proof_address: int
    proof: bytes
    places: bytes


@dataclass(slots=True)
class OwnMemory:
    """Memory that this process lets others read, as long as the object lives."""

    places: npt.NDArray[np.int64]
    _proof: npt.NDArray[np.uint8] = field(
        default_factory=lambda: np.frombuffer(os.urandom(32), np.uint8).copy()
    )

    def describe(self) -> MemoryMap:
        return MemoryMap(os.getpid(), self._proof.ctypes.data, self._proof.tobytes(), self.places.tobytes())


class ProcessMemory:
    """The memory of another process, or of this one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @staticmethod
    def open(memory: MemoryMap) -> ProcessMemory | None:
        """Return the memory of the process that made the map. Returns None if it cannot be read from here."""
        found = np.zeros(len(memory.proof), np.uint8)
        opened = ProcessMemory(memory.pid)
        try:
            opened.read(_one(found.ctypes.data), _one(memory.proof_address), _one(found.size))
        except (OSError, AttributeError):  # a libc without the call
            return None
        return opened if found.tobytes() == memory.proof and found.size else None

    def read(self, own: Addresses, others: Addresses, lengths: Addresses) -> None:
        """Copy pieces of the other process's memory into this one's.

        Raises:
            OSError: that process has ended, may not be read, or does not have these addresses.
        """
        for start in range(0, len(own), _MAX_PIECES):
            part = slice(start, start + _MAX_PIECES)
            wanted = int(lengths[part].sum())
            local, remote = (np.stack((each[part], lengths[part]), 1) for each in (own, others))
            count = _libc().process_vm_readv(
                self._pid,
                ctypes.c_void_p(local.ctypes.data),
                len(local),
                ctypes.c_void_p(remote.ctypes.data),
                len(remote),
                0,
            )
            if count != wanted:
                error = ctypes.get_errno() if count < 0 else 0
                raise OSError(
                    error, f"process {self._pid} gave {max(count, 0)} of {wanted} bytes: {os.strerror(error)}"
                )


def join_pieces(
    own: Addresses, others: Addresses, lengths: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Join pieces that follow each other in both memories."""
    follows = (own[1:] == own[:-1] + lengths[:-1]) & (others[1:] == others[:-1] + lengths[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return own[starts], others[starts], np.add.reduceat(lengths, starts)


def let_read(pid: int) -> None:
    """Let a process read this one's memory, where Yama restricts that to parents; the last one called for only."""
    _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _one(number: int) -> Addresses:
    return np.array([number], np.uint64)


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.process_vm_readv.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    ]  # fmt: skip
    return library
