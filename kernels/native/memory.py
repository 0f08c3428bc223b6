"""What the system and the allocator are asked for about a CPU's memory (native/memory.cpp). Nothing depends on it."""

from __future__ import annotations

from .library import is_available, library


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Asks for huge pages under memory that is written already and will be read as a whole, often."""
    if is_available():
        library().quire_use_huge_pages(address, num_bytes)


def keep_freed_memory(num_bytes: int) -> None:
    """Has this process keep up to so much of the memory that it frees, below 2 GiB, for what it takes next."""
    if is_available():
        library().quire_keep_freed_memory(num_bytes)
