"""RowBlocks: the blocks that rows hold, in each cache group and partition."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...proto.block_tables import BlockTables, IntArray, RowArray
from ...proto.config import EngineConfig
from .block_pool import SCRATCH_BLOCK, BlockPool


class RowBlocks:
    """The owner of the block tables: each entry is a reference to a block of the pool.

    A row has a table of blocks in each cache group, and needs `num_groups` blocks for the same tokens. A block that
    is behind the window of its group is released; its entry in the table stays, and is not read.

    All blocks of a row are in one partition of the pool, which is chosen when the row is opened.

    Attributes:
        tables: row |-> block ids and state slot; the ranks keep copies.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        num_rows, layout = config.scheduler.max_num_seqs, config.cache_layout
        self._pool, self._layout = pool, layout
        self._block_size, self._num_groups = config.cache.block_size, len(layout.groups)
        self.tables = BlockTables(num_rows, config.max_blocks_per_seq, self._num_groups)
        # table |-> index of its first block that is not released.
        self._first_live: IntArray = np.zeros(self._num_groups * num_rows, np.int32)
        self._partitions: RowArray = np.zeros(num_rows, np.intp)
        self._max_held = layout.max_held_blocks(config.scheduler.max_num_batched_tokens, self._block_size)

    # What there is

    def partition_of(self, row: int) -> int:
        """Return the partition of a row's blocks."""
        return int(self._partitions[row])

    def partitions_of(self, rows: Iterable[int]) -> set[int]:
        """Return the partitions that have blocks of some rows."""
        return set(self._partitions[list(rows)].tolist())

    def first_live(self, row: int, group: int) -> int:
        """Return the index of a row's first block in a group that is not released."""
        return int(self._first_live[self._table(row, group)])

    def block_of(self, row: int, group: int, index: int) -> int:
        """Return block number `index` of a row in a group."""
        return int(self.tables.ids[self._table(row, group), index])

    def blocks_of(self, row: int, group: int, first: int, end: int) -> list[int]:
        """Return some blocks of a row in a group, none of which may be released."""
        table = self._table(row, group)
        assert first >= self._first_live[table], f"row {row} has released block {first}, which is needed"
        blocks: list[int] = self.tables.ids[table, first:end].tolist()
        return blocks

    def blocks_at(self, rows: RowArray, index: IntArray) -> IntArray:
        """Return block number `index` of each row, [groups, rows]; the scratch block for one that was released."""
        if self._num_groups == 1 and not self._layout.has_windows:
            return self.tables.ids[rows, index][None]
        tables = rows + np.arange(self._num_groups)[:, None] * self.tables.num_rows
        is_live = index >= self._first_live[tables]
        return np.where(is_live, self.tables.ids[tables, index], SCRATCH_BLOCK)

    def held_ids(self, row: int) -> IntArray:
        """Return the blocks that a row holds, those with the latest tokens first."""
        length = int(self.tables.lens[row])
        if not self._layout.has_windows and self._num_groups == 1:
            return self.tables.row(row)[::-1]
        ids, first = (
            self.tables.ids[row :: self.tables.num_rows, :length],
            self._first_live[row :: self.tables.num_rows],
        )
        is_live = np.arange(length) >= first[:, None]
        held: IntArray = ids[:, ::-1].T[is_live[:, ::-1].T]
        return held

    # What is needed

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` fill in each group, the last perhaps in part."""
        return -(-num_tokens // self._block_size)

    def num_lacking_blocks(self, row: int, num_tokens: int) -> int:
        """Return the number of blocks that a row's tables lack to hold `num_tokens`."""
        return self._num_groups * max(0, self.num_blocks_for(num_tokens) - int(self.tables.lens[row]))

    def max_held_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence holds at once until it has `num_tokens`."""
        num_blocks = self.num_blocks_for(num_tokens)
        return sum(num_blocks if most is None else min(num_blocks, most) for most in self._max_held)

    def first_blocks(self, position: int) -> list[int]:
        """Return the index of the first block that a token at `position` attends to, in each group."""
        return [kind.first_block(position, self._block_size) for kind in self._layout.groups]

    def lacking_partitions(self, rows: RowArray, needs: dict[int, int]) -> set[int]:
        """Return the partitions with fewer free blocks than rows need.

        Args:
            rows: rows that need one block in each group, as often as they are listed.
            needs: row |-> blocks that it needs.
        """
        num_partitions = self._pool.num_partitions
        if num_partitions == 1:
            counts = [rows.size * self._num_groups + sum(needs.values())]
        else:
            num_rows = np.bincount(self._partitions[rows], minlength=num_partitions)
            counts = (num_rows * self._num_groups).tolist()
            for row, num_blocks in needs.items():
                counts[self.partition_of(row)] += num_blocks
        return {place for place, count in enumerate(counts) if count > self._pool.num_free_in(place)}

    # Changes

    def put(self, row: int, partition: int, firsts: list[int], blocks: list[list[int]]) -> None:
        """Put blocks, which have a reference for it, into the empty tables of a row.

        Args:
            firsts: index of the first block in the table of each group; those before it count as released.
            blocks: of each group from there on; all tables get the same length.
        """
        self._partitions[row] = partition
        for group, first in enumerate(firsts):
            self._first_live[self._table(row, group)] = first
        tables = [[SCRATCH_BLOCK] * first + own for first, own in zip(firsts, blocks, strict=True)]
        if tables and tables[0]:
            self.tables.put(row, np.array(tables, np.int32).ravel())

    def grow(self, row: int, num_tokens: int) -> tuple[list[int], list[int]]:
        """Extend a row's tables to hold `num_tokens`; return the table and the block of each new entry.

        The pool must have the blocks.
        """
        blocks = self._pool.allocate(self.num_lacking_blocks(row, num_tokens), self.partition_of(row))
        of_each = len(blocks) // self._num_groups
        tables = [self._table(row, group) for group in range(self._num_groups) for _ in range(of_each)]
        self.tables.append(np.array(tables, np.intp), np.array(blocks, np.int32))
        return tables, blocks

    def grow_by_one(self, rows: RowArray) -> tuple[IntArray | RowArray, IntArray]:
        """Allocate one more block in each group for each entry; return tables and blocks. The pool must have them.

        The entries of a row that repeats must be adjacent.
        """
        tables, blocks = self.tables.tables_of(rows), self._allocate(rows)
        self.tables.append(tables, blocks)
        return tables, blocks

    def _allocate(self, rows: RowArray) -> IntArray:
        """Allocate a block in each group for each entry of `rows`; return those of each group in turn."""
        num_partitions, num_blocks = self._pool.num_partitions, rows.size * self._num_groups
        if num_partitions == 1:
            return np.asarray(self._pool.allocate(num_blocks), np.int32)
        blocks = np.empty(num_blocks, np.int32)
        partitions = np.tile(self._partitions[rows], self._num_groups)
        for partition in range(num_partitions):
            is_own = partitions == partition
            blocks[is_own] = self._pool.allocate(int(is_own.sum()), partition)
        return blocks

    def release_behind_windows(self, rows: RowArray, positions: IntArray, fence_step: int | None) -> None:
        """Release the blocks of distinct rows that no token at `positions` or later attends to.

        Args:
            fence_step: as for BlockPool.release: steps in flight may compute earlier tokens.
        """
        for group, kind in enumerate(self._layout.groups):
            if not kind.window:
                continue
            tables = rows + group * self.tables.num_rows
            first = np.maximum(positions + 1 - kind.window, 0) // self._block_size
            passed = np.flatnonzero(first > self._first_live[tables])
            for table, end in zip(tables[passed].tolist(), first[passed].tolist(), strict=True):
                start = int(self._first_live[table])
                self._pool.release(self.tables.ids[table, start:end].tolist(), fence_step)
                self._first_live[table] = end

    def trim(self, rows: RowArray, lens: IntArray, fence_step: int | None) -> None:
        """Shorten the tables of distinct rows to `lens` blocks, which are not behind a window; release the others."""
        for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
            for group in range(self._num_groups):
                table = self._table(row, group)
                assert length >= self._first_live[table], (
                    f"row {row} is shortened to blocks that it has released"
                )
                self._pool.release(self.tables.row(table)[length:][::-1].tolist(), fence_step)
        self.tables.trim(rows, lens)

    def release(self, row: int, fence_step: int | None) -> None:
        """Release all of a row's blocks, the last first, so that prefixes are evicted from their ends."""
        self._pool.release(self.held_ids(row).tolist(), fence_step)
        self.tables.release(np.array([row], np.int32))
        self._first_live[row :: self.tables.num_rows] = 0

    def check_integrity(self) -> None:
        """Check that the tables agree with each other and with the partitions. Raises AssertionError."""
        tables = self.tables
        assert tables.num_blocks == tables.lens.sum(), "the entries of the block tables are miscounted"
        lens = tables.lens.reshape(self._num_groups, -1)
        assert (lens == lens[0]).all(), "the tables of a row differ in length"
        assert (self._first_live <= tables.lens).all(), "a table has released more blocks than it has"
        for row in range(tables.num_rows):
            partitions = {self._pool.partition_of(block_id) for block_id in self.held_ids(row).tolist()}
            assert partitions <= {self.partition_of(row)}, f"row {row} has blocks of another partition"

    def _table(self, row: int, group: int) -> int:
        return group * self.tables.num_rows + row
