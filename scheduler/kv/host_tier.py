"""HostTier: blocks in host memory, for evicted prefixes and preempted sequences."""

from __future__ import annotations

from collections.abc import Collection

from .block_pool import BlockPool
from .cache_journal import CacheJournal
from .prefix_cache import CacheKey, make_caches


class HostTier:
    """A second block pool, with prefix caches of its own. Its block 0 is never used, as in the device pool.

    Args:
        num_blocks: usable blocks.
        block_size: tokens per block.
        num_groups: cache groups.
        journal: see make_caches.
    """

    def __init__(self, num_blocks: int, block_size: int, num_groups: int, journal: CacheJournal) -> None:
        self._caches = make_caches(block_size, num_groups, journal)
        self._pool = BlockPool(num_blocks + 1, on_evict=self._forget)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks - 1

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    def find(self, group: int, digest: bytes) -> int | None:
        """Return the host block with that chain digest in a cache group, or None."""
        return self._caches[group].find(digest)

    def insert(self, group: int, key: CacheKey) -> int | None:
        """Allocate a host block for an evicted prefix block; None if none is free or the content is cached already.

        The caller holds the block until the plan that fills it is made, and then calls `release`.
        """
        if self._pool.num_free == 0 or self._caches[group].find(key.digest) is not None:
            return None
        (block_id,) = self._pool.allocate(1)
        self._caches[group].insert(key, block_id)
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
        for cache in self._caches:
            cache.clear()
        self._pool.forget_content()

    def forget_blocks(self, block_ids: Collection[int]) -> None:
        """Forget the content of some blocks. Held blocks stay held."""
        for cache in self._caches:
            cache.forget_blocks(block_ids)
        self._pool.forget_blocks(block_ids)

    def full_digests(self) -> list[bytes]:
        """Return the digests of all cached full blocks of the first cache group."""
        return self._caches[0].full_digests()

    def check_integrity(self, held: dict[int, int]) -> None:
        """Recount the pool.

        Args:
            held: block |-> references that sequences and plans have.
        """
        self._pool.check_integrity(held)
        for cache in self._caches:
            cache.check_integrity()

    def _forget(self, block_id: int) -> None:
        next(cache for cache in self._caches if block_id in cache).forget(block_id)
