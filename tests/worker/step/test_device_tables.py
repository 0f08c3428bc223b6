"""DeviceTables: equal to the host's block tables after each update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.proto.block_tables import BlockTables, IntArray
from quire.worker.step.device_rows import DeviceTables

NUM_ROWS, MAX_BLOCKS = 4, 6


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


@pytest.fixture(params=[False, True], ids=["own memory", "shared memory"])
def followed(request: pytest.FixtureRequest) -> tuple[BlockTables, DeviceTables]:
    tables = BlockTables(NUM_ROWS, MAX_BLOCKS)
    device_tables = DeviceTables(tables, torch.device("cpu"))
    if not request.param:
        device_tables._shared, device_tables.ids = False, device_tables.ids.clone()
    return tables, device_tables


def expect_equal(tables: BlockTables, device_tables: DeviceTables) -> None:
    for row in range(NUM_ROWS):
        assert device_tables.ids[row, : tables.lens[row]].tolist() == tables.row(row).tolist()


def test_update_sends_appended_entries(followed: tuple[BlockTables, DeviceTables]) -> None:
    tables, device_tables = followed
    device_tables.update()
    tables.append(ints(0, 2, 2, 3), ints(7, 8, 9, 10))
    device_tables.update()
    expect_equal(tables, device_tables)
    tables.append(ints(0, 2), ints(11, 12))
    tables.append(ints(1, 1, 1), ints(13, 14, 15))
    device_tables.update()
    expect_equal(tables, device_tables)


def test_entries_behind_a_window_are_its_first_block() -> None:
    tables = BlockTables(2, MAX_BLOCKS, num_groups=2)
    device_tables = DeviceTables(tables, torch.device("cpu"))
    tables.put(0, ints(5, 6, 7, 8, 15, 16, 17, 18))
    tables.put(1, ints(9, 19))
    index = torch.from_numpy(tables.tables_of(ints(0, 1)).astype(np.int32))
    first_columns = torch.tensor([[0], [0], [2], [0]])
    read = device_tables.read(index, 4, first_columns).tolist()
    assert read[0] == [5, 6, 7, 8]
    assert read[2] == [17, 17, 17, 18]
    assert [read[1][0], read[3][0]] == [9, 19]
    assert device_tables.read(index, 4, torch.empty(0, dtype=torch.int64))[2].tolist() == [15, 16, 17, 18]


def test_entries_of_released_row_are_sent_again(followed: tuple[BlockTables, DeviceTables]) -> None:
    tables, device_tables = followed
    tables.append(ints(1, 1, 2), ints(4, 5, 6))
    device_tables.update()
    tables.release(ints(1))
    device_tables.release(ints(1))
    tables.append(ints(1, 1, 3), ints(9, 4, 8))
    device_tables.update()
    expect_equal(tables, device_tables)
    tables.release(ints(1, 2))
    device_tables.release(ints(1, 2))
    device_tables.update()
    tables.append(ints(2), ints(1))
    device_tables.update()
    expect_equal(tables, device_tables)


def test_update_sends_new_entries_only(
    followed: tuple[BlockTables, DeviceTables], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, device_tables = followed
    tables.append(ints(0, 0, 1), ints(4, 5, 6))
    device_tables.update()
    monkeypatch.setattr(
        "quire.worker.step.device_rows.update_block_tables",
        lambda ids, entries: sent.extend(entries.tolist()),
    )
    sent: list[list[int]] = []
    tables.append(ints(0), ints(7))
    device_tables.update()
    device_tables.update()
    assert sent == ([] if device_tables._shared else [[0, 2, 7]])
