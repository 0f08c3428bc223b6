"""Admission to the partitions of the KV pool: a full one delays no sequence that fits into another."""

from __future__ import annotations

from typing import Any

import pytest
from driver import Driver
from fakes import beam_oracle, oracle, random_prompt, small_config

BLOCK_SIZE = 4


def make_driver(num_blocks: int, num_kv_partitions: int = 2, **settings: Any) -> Driver:
    """Return a driver; `num_blocks` are of each partition, without its scratch block."""
    options: dict[str, Any] = {"max_model_len": 4 * num_blocks, "max_num_batched_tokens": 64}
    return Driver(
        small_config(
            num_blocks=num_blocks + 1,
            block_size=BLOCK_SIZE,
            num_kv_partitions=num_kv_partitions,
            prefix_caching=False,
            eos=(),
            **(options | settings),
        )
    )


class Load:
    """Requests of one driver, whose outputs are checked at the end."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._requests: dict[int, tuple[list[int], int]] = {}  # handle |-> prompt, max_tokens

    def add(self, handle: int, num_prompt: int, max_tokens: int, **settings: Any) -> None:
        prompt = random_prompt(num_prompt, handle)
        self._requests[handle] = prompt, max_tokens
        assert self.driver.add(handle, prompt, max_tokens=max_tokens, **settings) is None

    def started_at_once(self, handle: int, num_prompt: int, max_tokens: int) -> bool:
        """Add a request and do one step; return whether the request was in this step."""
        self.add(handle, num_prompt, max_tokens)
        self.driver.step()
        return handle in self.driver.finishes or handle in self.running()

    def running(self) -> dict[int, int]:
        """Return handle |-> partition of the running sequences."""
        state = self.driver.scheduler._state
        return {each.handle: state.blocks.rows.partition_of(row) for row, each in state.running.items()}

    def finish(self) -> None:
        self.driver.run(depth=2)
        for handle, (prompt, max_tokens) in self._requests.items():
            assert self.driver.outputs[handle] == oracle(prompt, max_tokens, stops=())
        assert self.driver.scheduler.blocks.num_held_blocks == 0


def fill_partition_0(load: Load) -> None:
    """Start two sequences in partition 0 that outgrow it, and one in partition 1 that ends early."""
    for handle, num_prompt, max_tokens in ((0, 12, 20), (1, 16, 4), (2, 8, 16)):
        load.add(handle, num_prompt, max_tokens)
        load.driver.step()
    assert load.running() == {0: 0, 1: 1, 2: 0}


def test_partition_1_admits_in_every_step_while_partition_0_is_full() -> None:
    """Also in the step that preempts, and while the preempted sequence waits for the rank with its host blocks."""
    driver = make_driver(8, num_host_blocks=20, swap_blocks_per_s=1e9)
    load = Load(driver)
    fill_partition_0(load)
    handle, num_steps_waiting = 10, 0
    while 0 not in driver.finishes:
        assert load.started_at_once(handle, 3, 1)
        num_steps_waiting += driver.scheduler.num_waiting
        handle += 1
    assert driver.scheduler.stats.num_preemptions > 0
    assert num_steps_waiting > 4
    load.finish()


def test_preempted_sequence_without_kept_kv_continues_in_another_partition() -> None:
    driver = make_driver(8)
    load = Load(driver)
    fill_partition_0(load)
    while not driver.scheduler.stats.num_preemptions:
        driver.step()
    driver.step()
    assert load.running() == {0: 0, 2: 1}
    load.finish()
    assert driver.scheduler.stats.num_preemptions == 1


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "shortest-prefill", "longest-prefix"])
def test_long_sequence_waits_for_one_partition_and_short_ones_start_in_the_others(policy: str) -> None:
    """It needs a whole partition, and every third step a short request comes: no partition would become empty."""
    driver = make_driver(8, 3, policy=policy)
    load = Load(driver)
    for handle in range(3):
        load.add(handle, 4, 8)
    driver.step()
    assert set(load.running().values()) == {0, 1, 2}
    load.add(100, 28, 4)
    arrived_at = len(driver.plans)
    for handle in range(3, 30):
        assert load.started_at_once(handle, 4, 8)
        driver.step()
        driver.step()
        if 100 in load.running():
            break
    assert len(driver.plans) - arrived_at <= 12
    load.finish()
    assert driver.scheduler.stats.num_preemptions == 0


def test_preempted_later_sequences_stay_behind_a_passed_one() -> None:
    """Short requests outgrow their partitions. Those preempted do not start where the long one waits."""
    driver = make_driver(8, 3, max_num_seqs=16)
    load = Load(driver)
    for handle in range(3):
        load.add(handle, 4, 20)
    driver.step()
    load.add(100, 28, 4)
    arrived_at = len(driver.plans)
    for handle in range(3, 60):
        load.add(handle, 4, 20)
        driver.step(depth=2)
        if 100 in load.running():
            break
    assert driver.scheduler.stats.num_preemptions > 0
    assert len(driver.plans) - arrived_at <= 24
    load.finish()


def test_higher_priority_preempts_in_the_partition_with_lower_priority() -> None:
    """The other partition has more free blocks, but no victims."""
    driver = make_driver(8, policy="priority")
    load = Load(driver)
    load.add(0, 12, 16, priority=2)
    driver.step()
    load.add(1, 16, 8, priority=0)
    driver.step()
    assert load.running() == {0: 0, 1: 1}
    load.add(2, 20, 8, priority=2)
    driver.step()
    driver.step()
    assert load.running() == {0: 0, 2: 1}
    load.finish()


def test_beams_proceed_while_another_partition_stays_busy() -> None:
    """Frozen beams fill a partition, and wait for beams that have no room."""
    driver = make_driver(8)
    prompt = random_prompt(8, 1)
    load = Load(driver)
    driver.add(0, prompt, max_tokens=12, beam_width=4, n=4)
    handle = 10
    while 0 not in driver.finishes:
        load.add(handle, 12, 6)
        driver.step(depth=2)
        handle += 1
        assert handle < 300
    assert driver.scheduler.stats.num_preemptions > 0
    outputs = [driver.outputs[handle] for handle in range(4)]
    assert outputs == beam_oracle(prompt, 12, 4, 4, ())
    load.finish()


def test_mixed_lengths_take_few_steps() -> None:
    """Every fifth request needs most of a partition. With admission that stops as a whole these were 55 steps."""
    driver = make_driver(16, 8, max_num_seqs=64, max_num_batched_tokens=256)
    load = Load(driver)
    for handle in range(60):
        load.add(handle, *((44, 16) if handle % 5 == 0 else (8, 8)))
    load.finish()
    assert len(driver.plans) <= 50
