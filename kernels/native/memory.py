"""Hints to the system and the allocator about CPU memory (native/memory.cpp). Results do not depend on them."""

from __future__ import annotations

from .library import is_available, library


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Request huge pages for memory that is written already and will often be read as a whole."""
    if is_available():
        library().quire_use_huge_pages(address, num_bytes)


def keep_freed_memory(num_bytes: int) -> None:
    """Let this process keep up to `num_bytes`, below 2 GiB, of freed memory for later allocations."""
    if is_available():
        library().quire_keep_freed_memory(num_bytes)
