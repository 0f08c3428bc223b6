"""SharedSegment: memory that several processes of a host map, and that outlives the process that created it.

A segment is an anonymous file in memory (memfd_create): it has no path, the size of /dev/shm does not limit it, and
the system frees it with the last descriptor and mapping, even if all processes were killed. A process finds the
segment of another one by its address, through /proc, which admits processes of the same user only. It has to open the
segment while a process that has it open lives; from then on its own address is valid.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Linux; absent in Python 3.11.
_MAP_NORESERVE = 0x4000
_FINAL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """Place of an open segment.

    Attributes:
        pid: of a process that has the segment open.
        descriptor: in that process.
        name: unique, so that another file in the place of a closed one is not taken for the segment.
        num_bytes: length.
    """

    pid: int
    descriptor: int
    name: str
    num_bytes: int


class SharedSegment:
    """An open segment. Use `create` or `open`; `close` leaves mappings valid.

    One that is dropped is closed: an error between its opening and its owner would keep its memory otherwise.

    Attributes:
        name: of the segment, equal in all processes.
    """

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self._descriptor: int | None = descriptor

    @staticmethod
    def create(purpose: str, num_bytes: int) -> SharedSegment:
        """Create a segment of zeros. Memory is allocated when it is first written.

        Args:
            purpose: begin of its name, as /proc/PID/maps shows it.

        Raises:
            OSError: the system has no anonymous files, or the length is beyond the process's limit of a file.
        """
        name = f"quire-{purpose}-{secrets.token_hex(8)}"
        segment = SharedSegment(name, os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            os.ftruncate(segment._open, num_bytes)
        except OSError:
            segment.close()
            raise
        return segment

    @staticmethod
    def open(address: SegmentAddress) -> SharedSegment:
        """Open the segment of another process, or of this one.

        Raises:
            OSError: that process has ended, has closed the segment, or belongs to another user or host.
        """
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        segment = SharedSegment(address.name, descriptor)
        try:
            found, num_bytes = os.readlink(f"/proc/self/fd/{descriptor}"), segment.num_bytes
            if found != f"/memfd:{address.name} (deleted)":
                raise FileNotFoundError(
                    f"process {address.pid} has {found!r} open, not the segment {address.name}"
                )
            if num_bytes != address.num_bytes:
                raise FileNotFoundError(
                    f"the segment {address.name} has {num_bytes} bytes, must have {address.num_bytes}"
                )
        except OSError:
            segment.close()
            raise
        return segment

    @property
    def address(self) -> SegmentAddress:
        """The address by which other processes open the segment while this process has it open."""
        return SegmentAddress(os.getpid(), self._open, self.name, self.num_bytes)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._open).st_size

    def write(self, data: bytes | memoryview | mmap.mmap, start: int) -> None:
        """Write bytes at an offset, without a mapping.

        Raises:
            OSError: the segment is sealed, or there is no memory.
        """
        rest = memoryview(data).cast("B")
        while rest:
            count = os.pwrite(self._open, rest, start)
            rest, start = rest[count:], start + count

    def map(self) -> mmap.mmap:
        """Map the whole segment; all processes see what one of them writes. A mapping holds a descriptor, too.

        Raises:
            OSError: the segment is sealed.
        """
        return mmap.mmap(self._open, self.num_bytes)

    def map_on_huge_pages(self, *, is_read_only: bool = False) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
        """Map the whole segment as `map` does, on the huge pages that it has; return the mapping, and its bytes.

        Raises:
            OSError: the segment is sealed.
        """
        from ...kernels.native.memory import map_on_huge_pages  # torch, which gateways and controllers lack

        return map_on_huge_pages(self._open, self.num_bytes, is_read_only=is_read_only)

    def map_private(self) -> mmap.mmap:
        """Map the whole segment; its pages are shared until this process writes to them, which copies them.

        Pages beyond the final length must not be used.
        """
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE  # a segment may be longer than memory before it is sealed
        return mmap.mmap(self._open, self.num_bytes, flags=flags)

    def seal(self, num_bytes: int) -> None:
        """Set the final length, and let no process, this one included, change length or content any more.

        Raises:
            OSError: a process has a mapping by `map`.
        """
        os.ftruncate(self._open, num_bytes)
        fcntl.fcntl(self._open, fcntl.F_ADD_SEALS, _FINAL_SEALS)

    def copy(self) -> SharedSegment:
        """Return a sealed segment of the same content, in memory that this process has written.

        Raises:
            OSError: there is no memory.
        """
        purpose = self.name.split("-")[1]
        copied = SharedSegment.create(purpose, self.num_bytes)
        try:
            copied.write(mmap.mmap(self._open, self.num_bytes, access=mmap.ACCESS_READ), 0)
            copied.seal(self.num_bytes)
        except BaseException:
            copied.close()
            raise
        return copied

    @property
    def is_sealed(self) -> bool:
        """Return whether length and content are final."""
        return fcntl.fcntl(self._open, fcntl.F_GET_SEALS) & _FINAL_SEALS == _FINAL_SEALS

    def close(self) -> None:
        """Close the descriptor. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    @property
    def _open(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"the segment {self.name} is closed")
        return self._descriptor
