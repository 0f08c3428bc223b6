"""PrefixLookup: finds the cached beginning of a sequence in the caches of all cache groups."""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...proto.cache_groups import CacheLayout
from ...proto.digests import child_digest
from .prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached beginning of a sequence.

    Attributes:
        num_blocks: full blocks.
        blocks: for each cache group, the blocks that it needs in order, as (block, whether it is a host block): all
            of them, or the last ones for a group with a window; empty if there are none.
        partial: for each group the block whose first tokens continue the prefix, and the number of these tokens; to
            be copied.
        partition: of the pool, in which all these blocks are.
        snapshot: slot of the state after all these tokens; None if there are none, or the model has no states.
        num_shared_blocks: full blocks of the sequence that are cached, with a snapshot or without one; counted for
            models with states only.
    """

    num_blocks: int = 0
    blocks: tuple[tuple[tuple[int, bool], ...], ...] = ()
    partial: tuple[tuple[int, ...], int] | None = None
    partition: int = 0
    snapshot: int | None = None
    num_shared_blocks: int = 0

    def without_partial(self) -> Prefix:
        """Return the prefix without the partial block; an empty one if its snapshot is of these tokens."""
        if self.snapshot is not None:
            return Prefix(partition=self.partition, num_shared_blocks=self.num_shared_blocks)
        return replace(self, partial=None)

    def num_tokens(self, block_size: int) -> int:
        return self.num_blocks * block_size + (self.partial[1] if self.partial else 0)

    def places(self) -> list[tuple[int, bool]]:
        """Return the blocks of all groups."""
        return [place for group in self.blocks for place in group]


class BelowDevice(Protocol):
    """Owner of blocks that are not on the device."""

    def find(self, cache: int, digest: bytes) -> int | None:
        """Return the block with that chain digest in a cache, or None."""
        ...


class PrefixLookup:
    """Lookups in one partition's prefix caches of the device and of host memory.

    Args:
        block_size: tokens per block.
        caches: of each cache group.
        host: None without host memory.
        first_cache: number of the first of `caches` in the host tier.
    """

    def __init__(
        self,
        layout: CacheLayout,
        block_size: int,
        caches: Sequence[PrefixCache],
        host: BelowDevice | None,
        first_cache: int = 0,
    ) -> None:
        self._layout, self._block_size = layout, block_size
        self._caches, self._host, self._first_cache = caches, host, first_cache

    def find_blocks(self, digests: list[bytes]) -> tuple[tuple[tuple[tuple[int, bool], ...], ...], int]:
        """Return the blocks of the longest cached prefix, as in Prefix, and its number of blocks.

        A group without a window needs all blocks of the prefix, one with a window those that later tokens attend to.
        """
        groups, found = self._layout.groups, list[list[tuple[int, bool]]]()
        end = len(digests)
        for group, kind in enumerate(groups):
            places = [] if kind.window else self._find_first_blocks(group, digests[:end])
            found.append(places)
            end = end if kind.window else len(places)
        windowed = [group for group, kind in enumerate(groups) if kind.window]
        shorter = -1
        while shorter != end:  # a prefix that one group shortens may be too short for another one
            shorter = end
            for group in windowed:
                end = self._shorten_to_window(group, digests, end)
        for group in windowed:
            first = groups[group].first_block(end * self._block_size, self._block_size)
            found[group] = self._find_first_blocks(group, digests[first:end])
        return tuple(tuple(places[:end]) for places in found), end

    def _find_first_blocks(self, group: int, digests: list[bytes]) -> list[tuple[int, bool]]:
        """Return the blocks with the digests up to the first that is not cached."""
        found: list[tuple[int, bool]] = []
        for digest in digests:
            place = self._find_block(group, digest)
            if place is None:
                break
            found.append(place)
        return found

    def _find_block(self, group: int, digest: bytes) -> tuple[int, bool] | None:
        block_id = self._caches[group].find(digest)
        if block_id is not None:
            return block_id, False
        block_id = None if self._host is None else self._host.find(self._first_cache + group, digest)
        return None if block_id is None else (block_id, True)

    def _shorten_to_window(self, group: int, digests: list[bytes], end: int) -> int:
        """Return the largest number of blocks, at most `end`, of which the group has those in the window."""
        kind, index = self._layout.groups[group], end - 1
        while index >= kind.first_block(end * self._block_size, self._block_size):
            if self._find_block(group, digests[index]) is None:
                end = index
            index -= 1
        return end

    def find_partial(
        self, parent: bytes, tokens: array[int], excluded: Container[int]
    ) -> tuple[tuple[int, ...], int] | None:
        """Return a block of each group after `parent`, and how many of their first tokens are those of `tokens`.

        Returns None if a group has none that is worth a copy.

        Args:
            excluded: blocks that cannot be copied.
        """
        found = []
        for cache in self._caches:
            child = cache.closest_child(parent, tokens)
            if child is None or child[0] in excluded:
                return None
            found.append(child)
        return tuple(block_id for block_id, _ in found), min(count for _, count in found)

    def find_tail(
        self, parent: bytes, tokens: array[int], excluded: Container[int]
    ) -> tuple[tuple[int, ...], int] | None:
        """Return a block of each group after `parent` whose first tokens are `tokens`, as find_partial does."""
        found = self.find_partial(parent, tokens, excluded)
        if found is not None and found[1] == len(tokens):
            return found
        digest = child_digest(parent, tokens.tobytes())
        blocks = [cache.find(digest) for cache in self._caches]
        exact = tuple(block for block in blocks if block is not None and block not in excluded)
        return (exact, len(tokens)) if len(exact) == len(blocks) else None
