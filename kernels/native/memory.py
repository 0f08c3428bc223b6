"""CPU memory: huge pages, copies, and hints to the allocator (native/memory.cpp). Results depend on none of them."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .library import is_available, library

HUGE_PAGE_BYTES = 2 << 20
# Address space that is reserved at a time. Only what has been written takes memory.
CHUNK_BYTES = 32 << 20
# Smaller tensors stay where the allocator puts them.
MIN_BYTES = 64 << 10
_ALIGNMENT = 64
_MAP_NORESERVE = 0x4000  # Linux; absent in Python 3.11

Addresses = npt.NDArray[np.uint64]


class HugePages:
    """Tensors one after the other on huge pages, in chunks that are freed with the last tensor in them.

    Only whole huge pages can be huge: of weights of 1 to 6 MB that the allocator places anywhere, half of the memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: weakref.ref[mmap.mmap] | None = None  # tensors keep it alive
        self._end = 0  # of what is in use in the chunk

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy on huge pages, or elsewhere if the system has none or the tensor is small."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < MIN_BYTES or not tensor.is_cpu or not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor.contiguous()
        memory, start = self._take(num_bytes)
        count = tensor.numel()
        copied = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=start).view(tensor.shape)
        copied.copy_(tensor)
        # Collapses pages that the system did not have as huge ones when they were written.
        use_huge_pages(copied.data_ptr(), num_bytes)
        return copied

    def _take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Return a chunk and the offset of unused memory in it."""
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            if chunk is None or self._end + num_bytes > len(chunk):
                chunk, self._end = _reserve(max(num_bytes, CHUNK_BYTES))
                self._chunk = weakref.ref(chunk)
            start = self._end
            self._end = -(-(start + num_bytes) // _ALIGNMENT) * _ALIGNMENT
            return chunk, start


def _reserve(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return address space for that many bytes after the first huge page in it, and the offset of that page."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    with suppress(OSError):  # of a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    return memory, -address % HUGE_PAGE_BYTES


_huge_pages = HugePages()


def copy_to_huge_pages(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor that is often read as a whole; see HugePages.copy."""
    return _huge_pages.copy(tensor)


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Request huge pages for memory that is written already and will often be read as a whole."""
    if is_available():
        library().quire_use_huge_pages(address, num_bytes)


def keep_freed_memory(num_bytes: int) -> None:
    """Let this process keep up to `num_bytes`, below 2 GiB, of freed memory for later allocations."""
    if is_available():
        library().quire_keep_freed_memory(num_bytes)


def map_on_huge_pages(
    descriptor: int, num_bytes: int, *, is_read_only: bool = False
) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    """Map a file in memory for all processes that map it, so that its huge pages are huge in this one, too.

    Returns:
        The mapping, which the array keeps alive, and the file's bytes.

    Raises:
        OSError: the file cannot be mapped.
    """
    access = mmap.ACCESS_READ if is_read_only else mmap.ACCESS_WRITE
    if not is_available():
        memory = mmap.mmap(descriptor, num_bytes, access=access)
        return memory, np.frombuffer(memory, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    content = whole[start : start + num_bytes]
    if not library().quire_map_file(descriptor, content.ctypes.data, num_bytes, is_read_only):
        raise OSError(f"{num_bytes} bytes of a file in memory cannot be mapped")
    content.flags.writeable = not is_read_only
    return memory, content


def allocate_huge_pages(zeros: npt.NDArray[np.uint8]) -> None:
    """Allocate huge pages for a file of zeros that `map_on_huge_pages` has mapped, if the system has some."""
    if is_available():
        library().quire_allocate_huge_pages(zeros.ctypes.data, zeros.size, HUGE_PAGE_BYTES)


def copy_pieces(
    targets: Addresses, sources: Addresses, lengths: Addresses, *, bypasses_cache: bool = False
) -> None:
    """Copy pieces of memory, one after the other, without the interpreter's lock.

    Args:
        targets, sources, lengths: contiguous arrays.
        bypasses_cache: for targets that are not read soon.
    """
    if is_available():
        pointers = (each.ctypes.data for each in (targets, sources, lengths))
        library().quire_copy_pieces(*pointers, targets.size, bypasses_cache)
        return
    for target, source, length in zip(targets.flat, sources.flat, lengths.flat, strict=True):
        ctypes.memmove(int(target), int(source), int(length))
