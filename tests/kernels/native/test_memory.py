"""Reuse of freed memory by the allocator."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from quire.kernels.native.library import is_available
from quire.kernels.native.memory import keep_freed_memory

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
    assert num_faults() - before < num_pages / 10
