"""Blocks of layers with a window: released behind it, found again, forked, swapped and counted by cache group."""

from __future__ import annotations

from typing import Any

import pytest
from driver import Driver
from fakes import oracle, random_prompt, small_config

# One layer that attends to everything and one with a window of 8 tokens, two blocks.
MIXED = (0, 8)
LONG = {"max_model_len": 400, "eos": ()}


def make_driver(**settings: Any) -> Driver:
    return Driver(small_config(**{"layer_windows": MIXED, "num_blocks": 200, **LONG, **settings}))


@pytest.mark.parametrize(("windows", "num_full_groups"), [((8,), 0), ((0, 8), 1), ((0, 8, 8), 1)])
def test_long_sequence_holds_its_window_only(windows: tuple[int, ...], num_full_groups: int) -> None:
    driver = make_driver(layer_windows=windows)
    prompt = random_prompt(200)
    driver.add(0, prompt, max_tokens=100)
    most = num_full_groups * 75 + (len(windows) - num_full_groups) * 9  # a window, a chunk and both ends
    while driver.step(depth=2):
        assert driver.scheduler.blocks.num_held_blocks <= most
    assert driver.outputs[0] == oracle(prompt, 100, ())


def test_pool_serves_a_sequence_longer_than_itself() -> None:
    driver = make_driver(layer_windows=(8,), num_blocks=12)
    assert driver.config.max_servable_tokens == 400
    prompt = random_prompt(150)
    driver.add(0, prompt, max_tokens=200)
    driver.run(depth=2)
    assert driver.outputs[0] == oracle(prompt, 200, ())


def test_prefix_is_found_if_the_blocks_of_its_window_are_cached() -> None:
    driver = make_driver()
    prompt = random_prompt(120)
    driver.add(0, prompt, max_tokens=4)
    driver.run()
    driver.add(1, [*prompt, 5, 6], max_tokens=4)
    driver.run()
    assert driver.scheduler.blocks.num_hit_tokens >= 120
    assert driver.outputs[1] == oracle([*prompt, 5, 6], 4, ())


def test_prefix_without_the_blocks_of_its_window_is_shortened() -> None:
    driver = make_driver(num_blocks=50)
    prompt = random_prompt(80)
    driver.add(0, prompt, max_tokens=4)
    driver.run()
    driver.add(1, random_prompt(60, seed=1), max_tokens=60)  # evicts some of the first's blocks
    driver.run()
    driver.add(2, prompt, max_tokens=4)
    driver.run()
    assert driver.outputs[2] == oracle(prompt, 4, ())


def test_preempted_sequence_swaps_its_window_only() -> None:
    driver = make_driver(num_blocks=100, num_host_blocks=100, swap_blocks_per_s=1e12, prefix_caching=False)
    prompt = random_prompt(100)
    driver.add(0, prompt, max_tokens=60)
    while len(driver.outputs[0]) < 20:
        driver.step()
    state = driver.scheduler._state
    (sequence,) = state.running.values()
    state.preempt(sequence, driver.now)
    num_tokens = sequence.num_host_tokens
    end, first_in_window = (
        -(-num_tokens // 4),
        (num_tokens - 7) // 4,
    )  # the next token attends to itself and 7 more
    assert len(sequence.host_blocks) == end + end - first_in_window
    driver.run()
    assert driver.outputs[0] == oracle(prompt, 60, ())


def test_children_wait_on_their_own_once_the_window_has_moved_past_the_prompt() -> None:
    driver = make_driver(max_num_seqs=1)  # no row for the second output while the first runs
    prompt = random_prompt(30)
    driver.add(0, prompt, max_tokens=60, n=2)
    driver.run(depth=2)
    assert driver.outputs[0] == driver.outputs[1] == oracle(prompt, 60, ())


def test_more_sequences_run_at_once_with_groups() -> None:
    """Two layers, one of them with a window: the same memory is 80 blocks of both or 160 of either."""

    def most_running(windows: tuple[int, ...], num_blocks: int) -> int:
        driver = make_driver(layer_windows=windows, num_blocks=num_blocks + 1, max_num_seqs=16)
        for handle in range(16):
            driver.add(handle, random_prompt(100, seed=handle), max_tokens=20)
        most = 0
        while driver.step():
            most = max(most, driver.scheduler.num_running)
        assert driver.scheduler.stats.num_finished == 16
        return most

    assert most_running((0, 8), 160) > most_running((0, 0), 80)
