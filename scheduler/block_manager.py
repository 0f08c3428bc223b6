"""BlockManager: the one owner of every row's blocks. Pool, prefix cache and block tables change here together."""

from __future__ import annotations

import numpy as np

from ..proto.block_tables import BlockTables, IntArray
from ..proto.config import EngineConfig
from .block_pool import BlockPool
from .prefix_cache import PrefixCache
from .sequence import Sequence


class BlockManager:
    """Gives rows their blocks and takes them back.

    Attributes:
        tables: row |-> block ids; the truth that the ranks copy.
        num_query_tokens, num_hit_tokens: prompt tokens looked up in the prefix cache, and found.
    """

    def __init__(self, config: EngineConfig) -> None:
        num_blocks = config.cache.num_blocks
        assert num_blocks is not None, "the pool's size is resolved before the scheduler is made"
        self.block_size = config.cache.block_size
        self.tables = BlockTables(config.scheduler.max_num_seqs, config.max_blocks_per_seq)
        self._cache: PrefixCache | None = None
        if config.cache.prefix_caching:
            self._cache = PrefixCache(self.block_size, config.model.name.encode())
        self._pool = BlockPool(num_blocks, on_evict=self._forget)
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can have: all but the scratch block."""
        return self._pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_held_blocks(self) -> int:
        return self._pool.num_held

    @property
    def num_cached_blocks(self) -> int:
        return self._pool.num_cached

    @property
    def num_unheld_blocks(self) -> int:
        """Free now, or as soon as the steps in flight are done."""
        return self._pool.num_free + self._pool.num_fenced

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_lacking_blocks(self, row: int, num_tokens: int) -> int:
        """Blocks that a row's table needs to hold `num_tokens`."""
        return max(0, self.num_blocks_for(num_tokens) - int(self.tables.lens[row]))

    def num_free_beside(self, prefix: list[int]) -> int:
        """Blocks left to allocate once `prefix` is shared: those of it that nobody holds are free ones now."""
        return self._pool.num_free - sum(self._pool.is_cached(block_id) for block_id in prefix)

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the KV of the sequence's beginning already, always short of its last token.

        The last known token is computed again in any case: its logits are what the next one is sampled from.
        """
        if self._cache is None:
            return []
        num_full = (len(sequence.token_ids) - 1) // self.block_size
        self._cache.extend(sequence.block_digests, sequence.token_ids, num_full)
        return self._cache.match(sequence.block_digests[:num_full])

    def open(self, row: int, sequence: Sequence, prefix: list[int]) -> None:
        """Puts a cached prefix at the head of an empty row's table."""
        self._pool.share(prefix)
        self._append(row, prefix)
        if self._cache is not None:
            self.num_query_tokens += len(sequence.token_ids)
            self.num_hit_tokens += len(prefix) * self.block_size

    def grow(self, row: int, num_tokens: int) -> list[int]:
        """Extends a row's table to hold `num_tokens`; the pool must have the blocks. Returns the new ones."""
        blocks = self._pool.allocate(self.num_lacking_blocks(row, num_tokens))
        self._append(row, blocks)
        return blocks

    def grow_by_one(self, rows: IntArray) -> IntArray:
        """One more block for each row; the pool must have them. Returns the blocks."""
        blocks = np.asarray(self._pool.allocate(rows.size), np.int32)
        self.tables.append(rows, blocks)
        return blocks

    def publish(self, row: int, sequence: Sequence, first_token: int, end_token: int) -> None:
        """Makes the blocks findable that fill up as tokens `first_token` to `end_token` are computed.

        Called when the computation is planned: steps run in order, and a step writes its KV before it reads any,
        so whoever finds a block in this plan or a later one reads it after it was written.
        """
        if self._cache is None:
            return
        first, end = first_token // self.block_size, end_token // self.block_size
        self._cache.extend(sequence.block_digests, sequence.token_ids, end)
        for index, block_id in enumerate(self.tables.ids[row, first:end].tolist(), first):
            self._keep(sequence.block_digests[index], block_id)

    def close(self, row: int, fence_step: int | None) -> None:
        """Takes back all of a row's blocks, the last first: a prefix is evicted from its leaves."""
        self._pool.release(self.tables.row(row)[::-1].tolist(), fence_step)
        self.tables.release(np.array([row], np.int32))

    def lift_fences(self, step_id: int) -> None:
        self._pool.lift_fences(step_id)

    def check_integrity(self) -> None:
        """Recounts the pool against the tables; raises AssertionError on any difference."""
        tables = self.tables
        held = np.concatenate([tables.row(row) for row in range(len(tables.lens))])
        blocks, counts = np.unique(held, return_counts=True)
        self._pool.check_integrity(dict(zip(blocks.tolist(), counts.tolist(), strict=True)))
        if self._cache is not None:
            self._cache.check_integrity()

    def _append(self, row: int, blocks: list[int]) -> None:
        self.tables.append(np.full(len(blocks), row, np.int32), np.asarray(blocks, np.int32))

    def _keep(self, digest: bytes, block_id: int) -> None:
        assert self._cache is not None
        if self._cache.insert(digest, block_id):
            self._pool.keep_content(block_id)

    def _forget(self, block_id: int) -> None:
        if self._cache is not None:
            self._cache.forget(block_id)
