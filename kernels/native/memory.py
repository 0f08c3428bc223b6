"""CPU memory: huge pages for weights, and hints to the allocator (native/memory.cpp). Results depend on neither."""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from .library import is_available, library

HUGE_PAGE_BYTES = 2 << 20
# Address space that is reserved at a time. Only what has been written takes memory.
CHUNK_BYTES = 32 << 20
# Smaller tensors stay where the allocator puts them.
MIN_BYTES = 64 << 10
_ALIGNMENT = 64


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
