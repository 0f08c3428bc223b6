"""The map of KV blocks: states and holders, and its bound."""

from __future__ import annotations

import pytest
from driver import Driver
from fakes import random_prompt, small_config

from quire.proto.block_map import BlockState
from quire.scheduler.core.control import block_map as block_maps
from quire.scheduler.core.control.block_map import NO_ROW


def count(states: bytes, state: BlockState) -> int:
    return states.count(bytes((state,)))


def test_block_map_names_the_state_and_the_holder_of_each_block() -> None:
    driver = Driver(small_config(num_blocks=32, max_num_batched_tokens=64))
    head = random_prompt(16)  # four blocks
    driver.add(0, [*head, 5], max_tokens=8, ignore_eos=True)
    driver.add(1, [*head, 6], max_tokens=8, ignore_eos=True)
    driver.step()
    shown, blocks = driver.scheduler.block_map(7), driver.scheduler.blocks
    assert (shown.query_id, shown.num_blocks, shown.stride, len(shown.states)) == (7, 31, 1, 31)
    assert count(shown.states, BlockState.SHARED) == 4
    assert count(shown.states, BlockState.HELD) == blocks.num_held_blocks - 4
    assert count(shown.states, BlockState.EMPTY) == 31 - blocks.num_held_blocks
    for cell, state in enumerate(shown.states):
        assert (shown.rows[cell] == NO_ROW) == (state == BlockState.EMPTY)
    assert {each.row for each in shown.sequences} == {0, 1}
    for each in shown.sequences:
        table = set(blocks.tables.row(each.row).tolist())
        assert {1 + cell for cell, row in enumerate(shown.rows) if row == each.row} <= table
        assert (each.num_blocks, each.num_prompt_tokens) == (len(table), 17)
    driver.run()
    shown = driver.scheduler.block_map(8)
    assert count(shown.states, BlockState.CACHED) == blocks.num_cached_blocks > 0
    assert not shown.sequences


def test_block_map_names_the_holder_of_each_state() -> None:
    driver = Driver(small_config(num_blocks=32, max_num_batched_tokens=64, num_state_slots=6))
    driver.add(0, random_prompt(17), max_tokens=8, ignore_eos=True)
    driver.step()
    slots = driver.scheduler.blocks.state_slots
    (row,) = driver.scheduler._state.running
    shown = driver.scheduler.block_map(1)
    assert len(shown.slot_states) == slots.num_slots == 5
    assert shown.slot_states[slots.slot_of(row) - 1] == BlockState.HELD
    assert [place for place, holder in enumerate(shown.slot_rows, 1) if holder == row] == [slots.slot_of(row)]
    driver.run()
    shown = driver.scheduler.block_map(2)
    assert count(shown.slot_states, BlockState.CACHED) == slots.num_snapshots > 0
    assert set(shown.slot_rows.tolist()) == {NO_ROW}


def test_block_map_shows_fenced_blocks() -> None:
    driver = Driver(small_config(num_blocks=32))
    driver.add(0, random_prompt(16), max_tokens=8, ignore_eos=True)
    driver.scheduler.schedule(0.0)
    driver.scheduler.abort(b"gateway", 0, 0.0)
    shown = driver.scheduler.block_map(1)
    assert count(shown.states, BlockState.FENCED) == driver.scheduler.blocks.num_fenced_blocks == 4


def test_block_map_of_a_large_pool_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_maps, "MAX_MAP_CELLS", 10)
    driver = Driver(small_config(num_blocks=32))
    driver.add(0, random_prompt(30), max_tokens=8, ignore_eos=True)
    driver.step()
    shown = driver.scheduler.block_map(1)
    assert (shown.stride, len(shown.states), len(shown.rows)) == (4, 8, 8)
    held = set(driver.scheduler.blocks.tables.row(0).tolist())
    assert [row == 0 for row in shown.rows] == [1 + 4 * cell in held for cell in range(8)]
