"""HostTier: blocks in host memory, where evicted prefixes and preempted sequences wait to come back."""

from __future__ import annotations

from .block_pool import BlockPool
from .cache_journal import CacheJournal
from .prefix_cache import CacheKey, PrefixCache


class HostTier:
    """A second pool with a prefix cache of its own. Its block 0 is never used, as in the first.

    Args:
        num_blocks: blocks that it holds.
        block_size: tokens a block.
        journal: see PrefixCache.
    """

    def __init__(self, num_blocks: int, block_size: int, journal: CacheJournal) -> None:
        self._cache = PrefixCache(block_size, journal)
        self._pool = BlockPool(num_blocks + 1, on_evict=self._cache.forget)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks - 1

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    def find(self, digest: bytes) -> int | None:
        """The host block with that content."""
        return self._cache.find(digest)

    def take_in(self, key: CacheKey) -> int | None:
        """A host block for an evicted prefix block; None where there is room for none, or it is there already.

        The caller holds it until the plan that fills it is made (`release`).
        """
        if self._pool.num_free == 0 or self._cache.find(key.digest) is not None:
            return None
        (block_id,) = self._pool.allocate(1)
        self._cache.insert(key, block_id)
        self._pool.keep_content(block_id)
        return block_id

    def reserve(self, num_blocks: int) -> list[int] | None:
        """Host blocks for a preempted sequence; None where there are too few."""
        return self._pool.allocate(num_blocks) if num_blocks <= self._pool.num_free else None

    def hold(self, block_ids: list[int]) -> None:
        """Keeps cached blocks from being evicted, until `release`."""
        self._pool.share(block_ids)

    def release(self, block_ids: list[int]) -> None:
        self._pool.release(block_ids, fence_step=None)

    def full_digests(self) -> list[bytes]:
        """See PrefixCache."""
        return self._cache.full_digests()

    def check_integrity(self, held: dict[int, int]) -> None:
        """Recounts the pool; `held`: block |-> references that sequences have."""
        self._pool.check_integrity(held)
        self._cache.check_integrity()
