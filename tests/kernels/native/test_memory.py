"""Tensors on huge pages, and the reuse of freed memory by the allocator."""

from __future__ import annotations

import gc
import mmap
import platform
import resource
import weakref

import pytest
import torch

from quire.kernels.native.library import is_available
from quire.kernels.native.memory import CHUNK_BYTES, MIN_BYTES, HugePages, keep_freed_memory

NUM_BYTES = 24 << 20


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_reused_without_page_faults() -> None:
    if not is_available():
        pytest.skip("there is no C++ compiler")
    keep_freed_memory(256 << 20)
    for _ in range(8):
        torch.ones(NUM_BYTES, dtype=torch.uint8)
    before = num_faults()
    for _ in range(10):
        torch.ones(NUM_BYTES, dtype=torch.uint8)
    num_pages = 10 * NUM_BYTES // resource.getpagesize()
    # Blocks of earlier tests may leave no room for one of the tensors, whose pages are new then.
    assert num_faults() - before < num_pages / 2


needs_huge_pages = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="not Linux")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_copies_on_huge_pages_are_equal_contiguous_and_apart(dtype: torch.dtype) -> None:
    pages = HugePages()
    tensors = [
        torch.randint(-100, 100, (2, rows, 33)).to(dtype).transpose(0, 1) for rows in (1, 9_001, 70_000)
    ]
    copies = [pages.copy(tensor) for tensor in tensors]
    for tensor, copied in zip(tensors, copies, strict=True):
        assert copied.is_contiguous()
        assert copied.data_ptr() % 64 == 0
        assert copied.dtype == dtype
        assert torch.equal(copied, tensor)


@needs_huge_pages
def test_tensors_follow_each_other_in_a_chunk() -> None:
    pages, tensor = HugePages(), torch.ones(MIN_BYTES + 8, dtype=torch.uint8)
    first, second = pages.copy(tensor), pages.copy(tensor)
    assert second.data_ptr() - first.data_ptr() == MIN_BYTES + 64
    large = pages.copy(torch.ones(CHUNK_BYTES + (4 << 20), dtype=torch.uint8))
    assert large.data_ptr() % (2 << 20) == 0
    assert bool(torch.all(first == 1))
    assert bool(torch.all(large == 1))


@needs_huge_pages
def test_chunk_is_freed_with_its_last_tensor() -> None:
    pages, tensor = HugePages(), torch.ones(MIN_BYTES, dtype=torch.uint8)
    copies = [pages.copy(tensor), pages.copy(tensor)]
    assert pages._chunk is not None
    chunk: weakref.ref[mmap.mmap] = pages._chunk
    del copies[0]
    gc.collect()
    assert chunk() is not None
    copies.clear()
    gc.collect()
    assert chunk() is None
    assert torch.equal(pages.copy(tensor), tensor)
