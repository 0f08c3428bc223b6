"""BlockTables: the block ids and the state slot of each row, with a digest that the scheduler and the ranks compare.

The scheduler owns the tables; each rank builds a copy from the plans. Both apply the same deltas with the same code,
so equal digests mean that every rank reads and writes the blocks that the scheduler planned.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
# Row numbers that index arrays: numpy converts other integers at each use (64 rows: 1.2 us, against 0.15 us).
RowArray = npt.NDArray[np.intp]

_MASK = (1 << 64) - 1
_ROW_SHIFT, _INDEX_SHIFT = 48, 28
# Index of a row's state slot in the digest, beyond those of blocks.
_STATE_INDEX = (1 << (_ROW_SHIFT - _INDEX_SHIFT)) - 1
# Row in the digest of encoder outputs, beyond the others.
_MEDIA_ROW = (1 << 16) - 1
# Entries up to which `_mix` counts in Python ints: 4 entries take 1.8 us, with numpy 8.4 us as 64 entries do.
_FEW = 8


class BlockTables:
    """row |-> block ids, in each cache group (see proto.cache_groups).

    The table of row r in group g is number ``g * num_rows + r``. The tables of a row have the same length in all
    groups. A group with a window needs only the last entries of a table; the others are stale.

    Attributes:
        ids: [num_groups * num_rows, max_blocks] int32; table t has the blocks ``ids[t, :lens[t]]``.
        lens: [num_groups * num_rows] int32.
        state_slots: [num_rows] int32, slot of each row's state; 0 for none.
        num_blocks: entries of all tables together: the sum of `lens`.
        digest: 64-bit number of all (table, index, block id) and (row, state slot) together; 0 when every table is
            empty.
    """

    def __init__(self, num_rows: int, max_blocks: int, num_groups: int = 1) -> None:
        self.num_rows, self.num_groups = num_rows, num_groups
        self.ids: IntArray = np.zeros((num_groups * num_rows, max_blocks), dtype=np.int32)
        self.lens: IntArray = np.zeros(num_groups * num_rows, dtype=np.int32)
        self.state_slots: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._row_digests = np.zeros(num_groups * num_rows, dtype=np.uint64)
        self.num_blocks = 0
        self.digest = 0

    def row(self, row: int) -> IntArray:
        """Return the block ids of a table, [lens[row]]; a view."""
        return self.ids[row, : self.lens[row]]

    def ids_of_row(self, row: int) -> IntArray:
        """Return a copy of the row's block ids, those of each group in turn."""
        if self.num_groups == 1:
            return self.row(row).copy()
        return self.ids[row :: self.num_rows, : self.lens[row]].ravel()

    def tables_of(self, rows: IntArray | RowArray) -> IntArray | RowArray:
        """Return the numbers of the tables of rows, those of each group in turn."""
        if self.num_groups == 1:
            return rows
        return (np.arange(self.num_groups, dtype=np.intp)[:, None] * self.num_rows + rows).ravel()

    def put(self, row: int, block_ids: IntArray) -> None:
        """Append blocks to the tables of a row: equally many for each group, one group after the other."""
        tables = np.arange(row, self.lens.size, self.num_rows, dtype=np.intp)
        repeated: RowArray = np.repeat(tables, block_ids.size // self.num_groups)
        self.append(repeated, block_ids)

    def put_state(self, row: int, slot: int) -> None:
        """Give a row without a state slot one."""
        self.state_slots[row] = slot
        self._add(np.array([row], np.intp), np.array([_mix_one(row, _STATE_INDEX, slot)], np.uint64))

    def append(self, rows: IntArray | RowArray, block_ids: IntArray) -> None:
        """Append one block per entry. The entries of a table that repeats must be adjacent and in order.

        Args:
            rows: numbers of tables.
        """
        if rows.size == 0:
            return
        rows = rows.astype(np.intp, copy=False)
        index = self.lens[rows]
        if np.count_nonzero(rows[1:] == rows[:-1]):
            index += _run_offsets(rows)
            np.add.at(self.lens, rows, np.int32(1))
        else:  # as in steady decode: one block per row (4 rows: 1 us, with the offsets of runs 10 us)
            self.lens[rows] = index + 1
        self.ids[rows, index] = block_ids
        self.num_blocks += rows.size
        self._add(rows, _mix(rows, index, block_ids))

    def replace(self, rows: IntArray | RowArray, index: IntArray, block_ids: IntArray) -> None:
        """Replace ``ids[rows, index]`` by other blocks, for copy-on-write; `rows` are numbers of tables."""
        if rows.size == 0:
            return
        change = _mix(rows, index, block_ids) - _mix(rows, index, self.ids[rows, index])
        self.ids[rows, index] = block_ids
        self._add(rows, change)

    def trim(self, rows: IntArray | RowArray, lens: IntArray) -> None:
        """Shorten the tables of distinct rows to their first `lens` blocks, in all groups."""
        if rows.size == 0:
            return
        if self.num_groups > 1:
            rows, lens = self.tables_of(rows), np.tile(lens, self.num_groups)
        counts = self.lens[rows] - lens
        repeated = np.repeat(rows.astype(np.intp, copy=False), counts)
        ends = np.cumsum(counts)
        index = (np.arange(repeated.size) + np.repeat(self.lens[rows] - ends, counts)).astype(np.int32)
        self.num_blocks -= repeated.size
        self._add(repeated, -_mix(repeated, index, self.ids[repeated, index]))
        self.lens[rows] = lens

    def release(self, rows: IntArray | RowArray) -> None:
        """Empty the rows, which must be distinct, in all groups."""
        if rows.size == 0:
            return
        self.state_slots[rows] = 0
        rows = self.tables_of(rows)
        self.num_blocks -= int(self.lens[rows].sum())
        self.digest = (self.digest - int(self._row_digests[rows].sum(dtype=np.uint64))) & _MASK
        self._row_digests[rows] = 0
        self.lens[rows] = 0

    def _add(self, rows: IntArray | RowArray, values: npt.NDArray[np.uint64]) -> None:
        np.add.at(self._row_digests, rows, values)
        self.digest = (self.digest + int(values.sum(dtype=np.uint64))) & _MASK


def outputs_digest(media_ids: Iterable[int]) -> int:
    """Return the part of encoder outputs in a plan's digest, which adds up with that of the block tables."""
    return sum(_mix_one(_MEDIA_ROW, 0, media_id) for media_id in media_ids) & _MASK


def add_digests(first: int, second: int) -> int:
    """Return the digest of two parts of a rank's state."""
    return (first + second) & _MASK


def runs_of(rows: IntArray | RowArray) -> tuple[RowArray, RowArray]:
    """Return the start and the length of each run of equal rows, both [number of runs]."""
    is_start = np.empty(rows.size + 1, np.bool_)
    is_start[:1] = is_start[-1:] = rows.size > 0
    np.not_equal(rows[1:], rows[:-1], out=is_start[1:-1])
    bounds = is_start.nonzero()[0]
    return bounds[:-1], bounds[1:] - bounds[:-1]


def _run_offsets(rows: RowArray) -> IntArray:
    """Return each entry's position in its run of equal entries: [3, 3, 5] -> [0, 1, 0]."""
    if rows[0] == rows[-1]:  # one row, as when a sequence starts: 0.5 us, not 10 us
        return np.arange(rows.size, dtype=np.int32)
    starts, lengths = runs_of(rows)
    return (np.arange(rows.size) - np.repeat(starts, lengths)).astype(np.int32)


def _mix(rows: IntArray | RowArray, index: IntArray, block_ids: IntArray) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash per entry: the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    if rows.size <= _FEW:
        entries = zip(rows.tolist(), index.tolist(), block_ids.tolist(), strict=True)
        return np.array([_mix_one(*entry) for entry in entries], np.uint64)
    x = rows.astype(np.uint64) << np.uint64(_ROW_SHIFT)
    x |= index.astype(np.uint64) << np.uint64(_INDEX_SHIFT)
    x |= block_ids.astype(np.uint64)
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def _mix_one(row: int, index: int, block_id: int) -> int:
    """Return the hash of one entry."""
    x = ((row << _ROW_SHIFT | index << _INDEX_SHIFT | block_id) + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
