"""Entries: vectors that several successive tokens are compressed to, and their places in the blocks of these tokens.

Entries are cached in *pages*, which are layers of the cache without a window that all compressors of a model share:
an entry is stored in the block of the last of its tokens, so that it is shared, moved and dropped with this block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..errors import ConfigError

# Tokens of a block for which the number of pages is computed.
USUAL_BLOCK_SIZE = 16


@runtime_checkable
class HasEntries(Protocol):
    """The spec of a mixer that caches entries."""

    @property
    def rate(self) -> int:
        """Tokens per entry."""
        ...

    @property
    def cached_dim(self) -> int:
        """Elements of a token in a layer of the cache."""
        ...

    @property
    def has_spaced_entries(self) -> bool:
        """True if equal spaces lie from one entry to the next, within a block and from block to block.

        Ops then read the entries as they read tokens, with the block tables of these. Blocks must have whole entries,
        or entries whole blocks.
        """
        ...

    def compressed_dims(self) -> list[int]:
        """Return the elements of the entries that are computed, those of an indexer last."""
        ...


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """Place of a compressor's entries in a block: `count` entries from an element of a page on.

    Attributes:
        stride: elements from one entry to the next.
    """

    page: int
    start: int
    count: int
    stride: int


def place_entries(mixers: Sequence[object], block_size: int) -> list[list[EntryPlace]]:
    """Return the places of the entries of each mixer that has some: those of the layer, then of its indexer.

    Each goes to the first page that has room for it.
    """
    used, found = list[int](), list[list[EntryPlace]]()
    for mixer in mixers:
        if not isinstance(mixer, HasEntries):
            continue
        places, count = list[EntryPlace](), -(-block_size // mixer.rate)
        space = block_size * mixer.cached_dim
        for dim in mixer.compressed_dims():
            room, length, stride = space, count * dim, dim
            if mixer.has_spaced_entries:
                room, length, stride = space // count, dim, space // count
            page = next((index for index, end in enumerate(used) if end + length <= room), len(used))
            if page == len(used):
                used.append(0)
            places.append(EntryPlace(page, used[page], count, stride))
            used[page] += length
        found.append(places)
    return found


def num_pages(mixers: Sequence[object], block_size: int = USUAL_BLOCK_SIZE) -> int:
    """Return the pages of a model's entries; 0 for a model without any."""
    return max((place.page + 1 for own in place_entries(mixers, block_size) for place in own), default=0)


def check_block_size(name: str, mixers: Sequence[object], block_size: int) -> None:
    """Raise ConfigError if the entries of their tokens have no places in blocks of this size."""
    compressed = [mixer for mixer in mixers if isinstance(mixer, HasEntries)]
    for rate in sorted({own.rate for own in compressed if own.has_spaced_entries}):
        if block_size % rate and rate % block_size:
            raise ConfigError(
                f"{name}: block_size is {block_size}, must divide the {rate} tokens of its pools (index_kpool), or "
                "be a multiple"
            )
    if num_pages(mixers, block_size) > num_pages(mixers):
        raise ConfigError(
            f"{name}: block_size is {block_size}, which has no room for the vectors that its attention compresses "
            f"tokens to; use {USUAL_BLOCK_SIZE}"
        )
