"""KvSegment: the KV memory of a rank on a CPU, which ranks map that replace it or read its blocks."""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch
from torch import Tensor

from ...kernels.native.memory import allocate_huge_pages
from .shared_segment import SegmentAddress, SharedSegment

# Of each tensor, as torch aligns memory on a CPU.
_ALIGNMENT = 64
# Room for the alignment of thousands of tensors.
_PADDING_BYTES = 1 << 20


class KvSegment:
    """An open segment, whose memory tensors take one after the other.

    Attributes:
        is_inherited: it has the content that the process of another rank left.
    """

    def __init__(self, segment: SharedSegment, *, is_inherited: bool) -> None:
        self.is_inherited = is_inherited
        self._segment = segment
        self._memory, self._content = segment.map_on_huge_pages()
        self._bytes = torch.from_numpy(self._content)
        self._num_taken = 0

    @staticmethod
    def create(num_bytes: int) -> KvSegment:
        """Create a segment for tensors of `num_bytes` in all. Raises OSError if there is no such memory."""
        return KvSegment(SharedSegment.create("kv", num_bytes + _PADDING_BYTES), is_inherited=False)

    @staticmethod
    def open(address: SegmentAddress) -> KvSegment:
        """Open the segment of a rank that has ended. Raises OSError as SharedSegment.open does."""
        return KvSegment(SharedSegment.open(address), is_inherited=True)

    @property
    def address(self) -> SegmentAddress:
        return self._segment.address

    @property
    def start(self) -> int:
        """The address of the segment's memory in this process."""
        return self._bytes.data_ptr()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor on the next memory; the same calls in the same order return the same memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = -(-self._num_taken // _ALIGNMENT) * _ALIGNMENT
        self._num_taken = start + num_bytes
        assert self._num_taken <= len(self._bytes), f"a segment of {len(self._bytes)} bytes is full"
        return self._bytes[start : self._num_taken].view(dtype).view(shape)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a contiguous tensor is in the segment."""
        start = tensor.data_ptr() - self.start
        return start >= 0 and start + tensor.numel() * tensor.element_size() <= len(self._bytes)

    def touch_pages(self) -> None:
        """Allocate the memory of a segment of zeros now, on huge pages if the system has some."""
        allocate_huge_pages(self._content)

    def clear(self) -> None:
        """Give the memory back to the system, and take it from the beginning again. The content is zeros then."""
        start = self.start - np.frombuffer(self._memory, np.uint8).ctypes.data
        self._memory.madvise(mmap.MADV_REMOVE, start, len(self._bytes))
        self._num_taken = 0
        self.is_inherited = False

    def close(self) -> None:
        """Close the segment; tensors stay valid. Safe to call twice."""
        self._segment.close()
