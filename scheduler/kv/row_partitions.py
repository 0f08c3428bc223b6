"""RowPartitions: the partition of the KV pool that has the blocks of each row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...proto.block_tables import IntArray, RowArray
from .block_pool import BlockPool


class RowPartitions:
    """row |-> partition of the pool, chosen when the row is opened.

    Args:
        num_groups: cache groups: a row needs a block in each for the same tokens.
    """

    def __init__(self, num_rows: int, num_groups: int, pool: BlockPool) -> None:
        self._partitions: RowArray = np.zeros(num_rows, np.intp)
        self._num_groups, self._pool = num_groups, pool

    def of(self, row: int) -> int:
        return int(self._partitions[row])

    def of_rows(self, rows: Iterable[int]) -> set[int]:
        """Return the partitions of some rows."""
        return set(self._partitions[list(rows)].tolist())

    def assign(self, row: int, partition: int) -> None:
        self._partitions[row] = partition

    def lacking(self, rows: RowArray, needs: dict[int, int]) -> set[int]:
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
                counts[self.of(row)] += num_blocks
        return {place for place, count in enumerate(counts) if count > self._pool.num_free_in(place)}

    def allocate(self, rows: RowArray) -> IntArray:
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

    def check_integrity(self, row: int, block_ids: IntArray) -> None:
        """Check that the blocks of a row are in its partition."""
        partitions = {self._pool.partition_of(block_id) for block_id in block_ids.tolist()}
        assert partitions <= {self.of(row)}, f"row {row} has blocks of another partition"
