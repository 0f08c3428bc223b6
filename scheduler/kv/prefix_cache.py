"""PrefixCache: finds blocks that hold the KV of a prompt's beginning.

Blocks are found by chained digests (`proto/digests.py`). Those that agree with a prompt only in their first tokens
are found as well (`closest_child`), and are copied. So the last, partly filled block of a conversation serves its
next turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from ...proto.digests import child_digest
from .cache_journal import CacheJournal

# Blocks compared for a partial match: bounds the lookup time of popular prefixes.
MAX_CHILDREN_COMPARED = 8


class CacheKey(NamedTuple):
    """Content of a cached block: int32 tokens, a full block or fewer, after the chain with the digest `parent`."""

    digest: bytes
    parent: bytes
    tokens: bytes


class PrefixCache:
    """digest |-> block. Holds no references: on a hit the caller takes one.

    Args:
        block_size: tokens per block.
        journal: records each full block that is added or removed; None for no record.
    """

    def __init__(self, block_size: int, journal: CacheJournal | None = None) -> None:
        self.block_size = block_size
        self._full_width = 4 * block_size
        self._journal = journal
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, CacheKey] = {}
        # parent digest + first token |-> blocks. With a tuple as the key and a list of blocks, an insert takes 1.6 us
        # instead of 1.2 us.
        self._children: dict[bytes, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._key_of

    def extend(self, root: bytes, digests: list[bytes], token_ids: array[int], num_blocks: int) -> None:
        """Append the digests that a chain lacks for the first `num_blocks` full blocks of `token_ids`."""
        if len(digests) >= num_blocks:
            return
        raw, width = memoryview(token_ids).cast("B"), 4 * self.block_size
        parent = digests[-1] if digests else root
        for start in range(len(digests) * width, num_blocks * width, width):
            parent = child_digest(parent, raw[start : start + width])
            digests.append(parent)

    def find(self, digest: bytes) -> int | None:
        """Return the block with that chain digest, or None."""
        return self._block_of.get(digest)

    def closest_child(self, parent: bytes, tokens: array[int]) -> tuple[int, int] | None:
        """Return the block after `parent` with the most first tokens in common with `tokens`: (block, count)."""
        raw = tokens.tobytes()
        best: tuple[int, int] | None = None
        for block_id in self._children.get(parent + raw[:4], ())[:MAX_CHILDREN_COMPARED]:
            count = _common_tokens(raw, self._key_of[block_id].tokens)
            if best is None or count > best[1]:
                best = block_id, count
        return best

    def insert(self, key: CacheKey, block_id: int) -> bool:
        """Add a block. Returns False if a block with the same content is cached already."""
        digest, parent, tokens = key
        if digest in self._block_of or block_id in self._key_of:
            return False
        self._block_of[digest] = block_id
        self._key_of[block_id] = key
        child = parent + tokens[:4]
        self._children[child] = (*self._children.get(child, ()), block_id)
        if self._journal is not None and len(tokens) == self._full_width:
            self._journal.add(digest)
        return True

    def key_of(self, block_id: int) -> CacheKey:
        """Return the content of a cached block."""
        return self._key_of[block_id]

    def forget(self, block_id: int) -> None:
        """Remove a block: its content is evicted."""
        key = self._key_of.pop(block_id)
        del self._block_of[key.digest]
        child = key.parent + key.tokens[:4]
        others = self._children.pop(child)
        if len(others) > 1:
            self._children[child] = tuple(other for other in others if other != block_id)
        if self._journal is not None and len(key.tokens) == self._full_width:
            self._journal.remove(key.digest)

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Remove those of the blocks that are cached."""
        for block_id in block_ids:
            if block_id in self._key_of:
                self.forget(block_id)

    def clear(self) -> None:
        """Remove every block."""
        for block_id in list(self._key_of):
            self.forget(block_id)

    def full_digests(self) -> list[bytes]:
        """Return the digests of all cached full blocks."""
        return [key.digest for key in self._key_of.values() if len(key.tokens) == self._full_width]

    def check_integrity(self) -> None:
        """Raise AssertionError unless all maps agree."""
        digests = {key.digest: block_id for block_id, key in self._key_of.items()}
        for key in self._key_of.values():
            assert key.digest == child_digest(key.parent, key.tokens), (
                "a cached block has another block's digest"
            )
        assert digests == self._block_of, "the prefix cache's digests disagree with its blocks"
        listed = sorted(block_id for blocks in self._children.values() for block_id in blocks)
        assert listed == sorted(self._key_of), "the prefix cache's children disagree with its blocks"


def make_caches(
    block_size: int, num_groups: int, journal: CacheJournal, num_partitions: int = 1
) -> list[PrefixCache]:
    """Return a prefix cache for each cache group of each partition in turn.

    The journal records the blocks of the first group, in all partitions.
    """
    return [
        PrefixCache(block_size, None if group else journal)
        for _ in range(num_partitions)
        for group in range(num_groups)
    ]


def _common_tokens(left: bytes, right: bytes) -> int:
    """Return the number of equal first int32 tokens."""
    most = min(len(left), len(right)) // 4
    if left[: 4 * most] == right[: 4 * most]:
        return most
    return next(i for i in range(most) if left[4 * i : 4 * i + 4] != right[4 * i : 4 * i + 4])
