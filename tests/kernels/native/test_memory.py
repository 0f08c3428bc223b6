"""Tensors and files on huge pages, copies of pieces, and the reuse of freed memory by the allocator."""

from __future__ import annotations

import gc
import mmap
import os
import platform
import resource
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.native import memory
from quire.kernels.native.library import is_available
from quire.kernels.native.memory import (
    CHUNK_BYTES,
    HUGE_PAGE_BYTES,
    MIN_BYTES,
    Addresses,
    HugePages,
    allocate_huge_pages,
    copy_pieces,
    keep_freed_memory,
    map_on_huge_pages,
)

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


def pieces_of(content: np.ndarray[Any, Any], starts: list[int]) -> Addresses:
    return np.array([content.ctypes.data + start for start in starts], np.uint64)


@pytest.mark.parametrize("bypasses_cache", [False, True])
@pytest.mark.parametrize("is_native", [False, True])
def test_pieces_of_any_place_and_length_are_copied(
    monkeypatch: pytest.MonkeyPatch, bypasses_cache: bool, is_native: bool
) -> None:
    if not is_native:
        monkeypatch.setattr(memory, "is_available", lambda: False)
    elif not is_available():
        pytest.skip("there is no C++ compiler")
    lengths = [0, 1, 31, 127, 128, 159, 4096, 5001]
    starts = [1 + sum(lengths[:number]) + 7 * number for number in range(len(lengths))]
    source = np.random.default_rng(0).integers(1, 256, 16384, np.uint8)
    target, expected = np.zeros(16384, np.uint8), np.zeros(16384, np.uint8)
    for start, length in zip(starts, lengths, strict=True):
        expected[start : start + length] = source[start + 3 : start + 3 + length]
    into, out_of = pieces_of(target, starts), pieces_of(source, [start + 3 for start in starts])
    copy_pieces(into, out_of, np.array(lengths, np.uint64), bypasses_cache=bypasses_cache)
    assert np.array_equal(target, expected)


@needs_huge_pages
@pytest.mark.parametrize("is_native", [False, True])
def test_file_in_memory_is_shared_and_read_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    if not is_native:
        monkeypatch.setattr(memory, "is_available", lambda: False)
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, HUGE_PAGE_BYTES + 4096)
        _, content = map_on_huge_pages(descriptor, HUGE_PAGE_BYTES + 4096)
        allocate_huge_pages(content)
        assert not content.any()
        content[[0, -1]] = 7, 9
        _, seen = map_on_huge_pages(descriptor, HUGE_PAGE_BYTES + 4096, is_read_only=True)
        assert seen[[0, -1]].tolist() == [7, 9]
        assert not seen.flags.writeable
        if is_native and is_available():
            assert content.ctypes.data % HUGE_PAGE_BYTES == seen.ctypes.data % HUGE_PAGE_BYTES == 0
    finally:
        os.close(descriptor)
