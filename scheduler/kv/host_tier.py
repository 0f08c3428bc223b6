"""HostTier: blocks in host memory, for evicted prefixes and preempted sequences."""

from __future__ import annotations

from collections.abc import Collection

from .block_pool import BlockPool
from .cache_events import HOST_MEDIUM, CacheEvents, CacheKey
from .cache_journal import CacheJournal
from .prefix_cache import make_caches


class HostTier:
    """A second block pool, with prefix caches of its own. Its block 0 is never used, as in the device pool.

    It has the partitions of the device pool, whose ranks hold their host blocks as well. `cache` is the number of a
    prefix cache: a cache per group for each partition in turn.

    Args:
        num_blocks: usable blocks of each partition.
        block_size: tokens per block.
        num_groups: cache groups.
        journal, events: see make_caches.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_groups: int,
        journal: CacheJournal,
        events: CacheEvents,
        num_partitions: int = 1,
    ) -> None:
        self._num_groups = num_groups
        self._caches = make_caches(block_size, num_groups, journal, events, HOST_MEDIUM, num_partitions)
        self._pool = BlockPool(num_blocks + 1, self._forget, num_partitions)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    @property
    def room(self) -> tuple[int, int]:
        """Return all blocks, and those that can be allocated, with cached content or without."""
        return self._pool.num_blocks, self._pool.num_free

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    def partition_of(self, block_id: int) -> int:
        return self._pool.partition_of(block_id)

    def find(self, cache: int, digest: bytes) -> int | None:
        """Return the host block with that chain digest in a cache, or None."""
        return self._caches[cache].find(digest)

    def insert(self, cache: int, key: CacheKey) -> int | None:
        """Allocate a host block for an evicted prefix block; None if none is free or the content is cached already.

        The caller holds the block until the plan that fills it is made, and then calls `release`.
        """
        partition = cache // self._num_groups
        if self._pool.num_free_in(partition) == 0 or self._caches[cache].find(key[0]) is not None:
            return None
        (block_id,) = self._pool.allocate(1, partition)
        self._caches[cache].insert(key, block_id)
        self._pool.keep_content([block_id])
        return block_id

    def fill(self, cache: int, key: CacheKey, block_id: int) -> None:
        """List a held block, which has the content now, unless the content is cached already."""
        if self._caches[cache].insert(key, block_id):
            self._pool.keep_content([block_id])

    def reserve(self, num_blocks: int, partition: int = 0) -> list[int] | None:
        """Allocate host blocks of a partition for a preempted sequence. Returns None if too few are free."""
        has_room = num_blocks <= self._pool.num_free_in(partition)
        return self._pool.allocate(num_blocks, partition) if has_room else None

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
        """Return the digests of all cached full blocks of the first cache group, in each partition."""
        return [digest for cache in self._caches[:: self._num_groups] for digest in cache.full_digests()]

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
