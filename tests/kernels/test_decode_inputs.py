"""gather_decodes: the C++ op equals the reference, and both gather what the rows have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels import decode_inputs
from quire.kernels.decode_inputs import DecodeInputs, RowTables, gather_decodes
from quire.kernels.native.library import is_available

NUM_ROWS, MAX_LEN, BLOCK_SIZE = 5, 40, 4
LENS = np.array([1, 4, 5, 33, 12], np.int32)


@pytest.fixture(params=["native", "reference"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RowTables:
    if request.param == "native" and not is_available():
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(decode_inputs, "is_available", lambda: request.param == "native")
    return make_tables()


def make_tables() -> RowTables:
    token_ids = torch.arange(NUM_ROWS * MAX_LEN, dtype=torch.int32).view(NUM_ROWS, MAX_LEN)
    max_blocks = MAX_LEN // BLOCK_SIZE
    block_tables = torch.randperm(NUM_ROWS * max_blocks).int().view(NUM_ROWS, max_blocks)
    return RowTables(token_ids, LENS.copy(), block_tables, BLOCK_SIZE)


def gather(tables: RowTables, counts: dict[int, int]) -> DecodeInputs:
    """Gather row |-> tokens."""
    last = max(int(tables.lens[row]) + count - 1 for row, count in counts.items())
    rows, lens = np.array([*counts]), np.array([*counts.values()], np.int32)
    return gather_decodes(tables, rows, lens, -(-last // BLOCK_SIZE))


def check(tables: RowTables, inputs: DecodeInputs, tokens: list[tuple[int, int]]) -> None:
    """Check the inputs of tokens at (row, position)."""
    assert inputs.token_rows.tolist() == [row for row, _ in tokens]
    assert inputs.positions.tolist() == [position for _, position in tokens]
    assert inputs.token_ids.tolist() == [row * MAX_LEN + position for row, position in tokens]
    assert inputs.seq_lens.tolist() == [position + 1 for _, position in tokens]
    for (row, position), slot in zip(tokens, inputs.slots.tolist(), strict=True):
        block_id = int(tables.block_tables[row, position // BLOCK_SIZE])
        assert slot == block_id * BLOCK_SIZE + position % BLOCK_SIZE
    width = 1 + max(position for _, position in tokens) // BLOCK_SIZE
    expected = tables.block_tables[[row for row, _ in tokens], :width]
    assert torch.equal(inputs.block_tables, expected)
    assert inputs.token_rows.dtype == np.int64
    assert inputs.positions.dtype == inputs.slots.dtype == torch.int64
    assert inputs.token_ids.dtype == inputs.seq_lens.dtype == inputs.block_tables.dtype == torch.int32


@pytest.mark.parametrize("rows", [[3], [0, 2, 4], [0, 1, 2, 3, 4]])
def test_newest_tokens_are_gathered(tables: RowTables, rows: list[int]) -> None:
    check(tables, gather(tables, dict.fromkeys(rows, 1)), [(row, int(LENS[row]) - 1) for row in rows])


def test_drafted_tokens_follow_the_newest(tables: RowTables) -> None:
    counts = {0: 1, 1: 3, 3: 5, 4: 2}
    firsts = {row: int(LENS[row]) - 1 for row in counts}
    tokens = [(row, firsts[row] + place) for row, count in counts.items() for place in range(count)]
    check(tables, gather(tables, counts), tokens)


def test_changes_of_the_rows_are_seen(tables: RowTables) -> None:
    tables.lens[2] += 1
    check(tables, gather(tables, {2: 1}), [(2, int(LENS[2]))])
