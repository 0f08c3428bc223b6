"""HostTier: blocks in host memory, for evicted prefixes and preempted sequences."""

from __future__ import annotations

from .block_pool import BlockPool
from .cache_journal import CacheJournal
from .prefix_cache import CacheKey, PrefixCache


class HostTier:
    """A second block pool, with a prefix cache of its own. Its block 0 is never used, as in the device pool.

    Args:
        num_blocks: usable blocks.
        block_size: tokens per block.
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
        """Return the host block with that chain digest, or None."""
        return self._cache.find(digest)

    def insert(self, key: CacheKey) -> int | None:
        """Allocate a host block for an evicted prefix block; None if none is free or the content is cached already.

        The caller holds the block until the plan that fills it is made, and then calls `release`.
        """
        if self._pool.num_free == 0 or self._cache.find(key.digest) is not None:
            return None
        (block_id,) = self._pool.allocate(1)
        self._cache.insert(key, block_id)
        self._pool.keep_content(block_id)
        return block_id

    def reserve(self, num_blocks: int) -> list[int] | None:
        """Allocate host blocks for a preempted sequence. Returns None if too few are free."""
        return self._pool.allocate(num_blocks) if num_blocks <= self._pool.num_free else None

    def hold(self, block_ids: list[int]) -> None:
        """Protect cached blocks from eviction until `release`."""
        self._pool.share(block_ids)

    def release(self, block_ids: list[int]) -> None:
        self._pool.release(block_ids, fence_step=None)

    def flush_cache(self) -> None:
        """Forget the content of all blocks. Held blocks stay held."""
        self._cache.clear()
        self._pool.forget_content()

    def full_digests(self) -> list[bytes]:
        """Return the digests of all cached full blocks."""
        return self._cache.full_digests()

    def check_integrity(self, held: dict[int, int]) -> None:
        """Recount the pool.

        Args:
            held: block |-> references that sequences and plans have.
        """
        self._pool.check_integrity(held)
        self._cache.check_integrity()
