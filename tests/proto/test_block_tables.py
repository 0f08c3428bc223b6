"""BlockTables: equal tables have equal digests whatever their history, different tables different ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.proto.block_tables import BlockTables, IntArray

NUM_ROWS, MAX_BLOCKS = 6, 8


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def filled(rows: dict[int, list[int]]) -> BlockTables:
    tables = BlockTables(NUM_ROWS, MAX_BLOCKS)
    for row, block_ids in rows.items():
        tables.append(ints(*[row] * len(block_ids)), ints(*block_ids))
    return tables


def test_append_adds_several_blocks_to_several_rows() -> None:
    tables = filled({0: [9]})
    tables.append(ints(0, 0, 2, 5, 5, 5), ints(1, 2, 3, 4, 5, 6))
    assert tables.row(0).tolist() == [9, 1, 2]
    assert tables.row(2).tolist() == [3]
    assert tables.row(5).tolist() == [4, 5, 6]
    assert tables.digest == filled({0: [9, 1, 2], 2: [3], 5: [4, 5, 6]}).digest


def test_append_of_many_blocks_equals_appends_of_one() -> None:
    at_once, singly = BlockTables(40, MAX_BLOCKS), BlockTables(40, MAX_BLOCKS)
    for first_id in (1, 101):
        at_once.append(np.arange(40), np.arange(first_id, first_id + 40, dtype=np.int32))
        for row in range(40):
            singly.append(ints(row), ints(first_id + row))
    assert at_once.ids.tolist() == singly.ids.tolist()
    assert at_once.digest == singly.digest
    for tables in (at_once, singly):
        tables.release(np.arange(5, 40))
    assert at_once.digest == singly.digest
    assert at_once.num_blocks == singly.num_blocks == 10


def test_digest_follows_replace_and_release() -> None:
    tables = filled({1: [4, 5], 3: [6]})
    tables.replace(ints(1), ints(1), ints(7))
    assert tables.digest == filled({1: [4, 7], 3: [6]}).digest
    tables.release(ints(1))
    assert tables.digest == filled({3: [6]}).digest
    tables.release(ints(3))
    assert tables.digest == 0


tables_by_row = st.dictionaries(
    st.integers(0, NUM_ROWS - 1),
    st.lists(st.integers(1, 40), min_size=1, max_size=MAX_BLOCKS),
    max_size=NUM_ROWS,
)


@given(tables_by_row, tables_by_row)
def test_digests_are_equal_only_for_equal_tables(
    one: dict[int, list[int]], other: dict[int, list[int]]
) -> None:
    assert (filled(one).digest == filled(other).digest) == (one == other)


@given(tables_by_row)
def test_digest_depends_only_on_the_content(rows: dict[int, list[int]]) -> None:
    tables = filled({row: [block + 1 for block in blocks] for row, blocks in rows.items()})
    for row, blocks in rows.items():
        row_ids = ints(*[row] * len(blocks))
        tables.replace(row_ids, np.arange(len(blocks), dtype=np.int32), ints(*blocks))
    assert tables.digest == filled(rows).digest
