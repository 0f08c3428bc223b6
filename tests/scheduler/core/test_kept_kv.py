"""KV that survived a failure of the ranks is used again; what steps in flight were writing is not."""

from __future__ import annotations

import numpy as np
import pytest
from driver import Driver
from fakes import oracle, random_prompt, small_config

from quire.proto.engine_command import Action, EngineCommand
from quire.proto.errors import RequestQuarantined
from quire.scheduler.kv.kv_tiers import KvTiers
from quire.scheduler.kv.planned_moves import PendingFills
from quire.scheduler.sequences.sequence import Sequence

FAST = 1e12  # blocks/s: swapping is always cheaper than computing again
SURVIVING = [KvTiers.HOST, KvTiers.ALL]


def swapping_driver() -> Driver:
    """Return a driver with two sequences, of which one will be swapped out."""
    driver = Driver(
        small_config(num_blocks=8, num_host_blocks=8, swap_blocks_per_s=FAST, prefix_caching=False)
    )
    for handle in range(2):
        driver.add(handle, random_prompt(12, handle), max_tokens=12, ignore_eos=True)
    return driver


def swapped(driver: Driver) -> list[Sequence]:
    return [sequence for sequence in driver.scheduler._state.alive.values() if sequence.host_blocks]


def check_outputs(driver: Driver, num_outputs: int, max_tokens: int) -> None:
    for handle in range(num_outputs):
        assert driver.outputs[handle] == oracle(random_prompt(12, handle), max_tokens, stops=())
    host = driver.scheduler.blocks.host
    assert driver.scheduler.blocks.num_held_blocks == 0
    assert host is None or host.num_held == 0


@pytest.mark.parametrize("kept", SURVIVING)
def test_swapped_sequence_is_swapped_in_after_a_recovery(kept: KvTiers) -> None:
    driver = swapping_driver()
    while not swapped(driver):
        driver.step()
    driver.step()  # all ranks have copied the blocks
    (sequence,) = swapped(driver)
    num_host_tokens = sequence.num_host_tokens
    driver.lose_ranks(kept=kept)
    assert driver.scheduler.stats.num_retained_tokens == num_host_tokens > 0
    driver.run()
    check_outputs(driver, 2, 12)
    assert driver.finishes[sequence.handle].timings.recomputed_tokens == 0
    assert sum(len(plan.swap_in) for plan in driver.plans) > 0


def test_swap_in_flight_does_not_count() -> None:
    driver = swapping_driver()
    while not swapped(driver):
        driver.step() if driver.scheduler.num_in_flight else driver.plan()
    (sequence,) = swapped(driver)
    assert len(driver.plans[-1].swap_out)
    driver.lose_ranks(kept=KvTiers.ALL)
    assert not sequence.host_blocks
    driver.run()
    check_outputs(driver, 2, 12)
    assert driver.finishes[sequence.handle].timings.recomputed_tokens > 0


@pytest.mark.parametrize("kept", SURVIVING)
def test_prefix_in_host_memory_is_found_after_a_recovery(kept: KvTiers) -> None:
    driver = Driver(small_config(num_blocks=12, num_host_blocks=64, swap_blocks_per_s=FAST))
    driver.add(0, random_prompt(20), max_tokens=1)
    driver.run()
    for handle in range(1, 6):
        driver.add(handle, random_prompt(30, handle), max_tokens=1)
        driver.run()
    driver.lose_ranks(kept=kept)
    driver.add(9, [*random_prompt(20), 7], max_tokens=3, ignore_eos=True)
    driver.run()
    assert driver.finishes[9].num_cached_tokens == 20
    assert driver.outputs[9] == oracle([*random_prompt(20), 7], 3, stops=())


@pytest.mark.parametrize("depth", [1, 2])
def test_running_sequences_keep_their_full_blocks(depth: int) -> None:
    driver = Driver(small_config(num_blocks=64, max_model_len=128, max_num_batched_tokens=64))
    for handle in range(4):
        driver.add(handle, random_prompt(12, handle), max_tokens=30, ignore_eos=True)
    while len(driver.outputs[3]) < 20:
        driver.step(depth)
    driver.plan()  # its result never comes
    driver.lose_ranks(kept=KvTiers.ALL)
    num_executed = driver.group.num_executed_tokens
    driver.plan()
    driver.apply_result()
    block_size = driver.scheduler.blocks.block_size
    assert driver.group.num_executed_tokens - num_executed <= 4 * (block_size + 1)
    driver.run(depth)
    check_outputs(driver, 4, 30)
    assert driver.scheduler.stats.num_retained_tokens >= 4 * (12 + 20 - 2 * block_size)


def test_chunks_count_once_a_step_has_sampled() -> None:
    """A step that samples nothing ends before all ranks have computed it."""
    driver = Driver(small_config(num_blocks=64, max_num_batched_tokens=8))
    driver.add(0, random_prompt(32), max_tokens=2, ignore_eos=True)
    for _ in range(3):
        driver.step()
    driver.lose_ranks(kept=KvTiers.ALL)
    assert driver.scheduler.blocks.num_cached_blocks == 0
    while not driver.outputs[0]:
        driver.step()
    driver.lose_ranks(kept=KvTiers.ALL)
    assert driver.scheduler.blocks.num_cached_blocks == 8
    driver.run()
    assert driver.outputs[0] == oracle(random_prompt(32), 2, stops=())


def test_swapped_in_blocks_are_found_after_a_recovery() -> None:
    driver = Driver(small_config(num_blocks=10, num_host_blocks=64, swap_blocks_per_s=FAST))
    for handle in range(2):
        driver.add(handle, random_prompt(12, handle), max_tokens=16, ignore_eos=True)
    while not any(len(plan.swap_in) for plan in driver.plans):
        driver.step()
    driver.step()
    running = {sequence.handle for sequence in driver.scheduler._state.running.values()}
    driver.lose_ranks(kept=KvTiers.ALL)
    driver.run()
    check_outputs(driver, 2, 16)
    block_size = driver.scheduler.blocks.block_size
    assert running
    assert all(driver.finishes[handle].timings.recomputed_tokens <= block_size for handle in running)


def run_with_random_faults(seed: int) -> Driver:
    """Run random requests in a pool that is too small for them, and lose the ranks now and then."""
    rng = np.random.default_rng(seed)
    config = small_config(
        num_blocks=int(rng.integers(18, 30)),
        num_host_blocks=int(rng.choice([3, 12, 40])),
        swap_blocks_per_s=FAST,
        prefix_caching=bool(rng.random() < 0.8),
        max_num_seqs=5,
        num_speculative_tokens=int(rng.choice([0, 0, 3])),
        layer_windows=((0,), (0,), (0, 9))[int(rng.integers(3))],
    )
    driver, expected = Driver(config), dict[int, list[int]]()
    for handle in range(10):
        prompt = random_prompt(int(rng.integers(0, 13)), int(rng.integers(2))) + random_prompt(5, handle)
        expected[handle] = oracle(prompt, 12, stops=())
        driver.add(handle, prompt, max_tokens=12, ignore_eos=True)
        if rng.random() < 0.3:
            lose_ranks_in_a_step(driver, rng)
        for _ in range(int(rng.integers(4))):
            driver.step(depth=2)
    while driver.scheduler.has_work:
        if rng.random() < 0.05:
            lose_ranks_in_a_step(driver, rng)
        driver.step(int(rng.integers(1, 4)))
    ends = driver.finishes.items()
    quarantined = {handle for handle, end in ends if end.error_reason == RequestQuarantined.reason}
    assert len(quarantined) < len(expected) // 2
    for handle, output in driver.outputs.items():
        assert output == expected[handle][: len(output) if handle in quarantined else None]
    blocks = driver.scheduler.blocks
    assert blocks.num_held_blocks == 0
    assert blocks.host is not None
    assert blocks.host.num_held == 0
    return driver


def lose_ranks_in_a_step(driver: Driver, rng: np.random.Generator) -> None:
    driver.plan()
    driver.lose_ranks(kept=(KvTiers.NONE, *SURVIVING)[int(rng.integers(3))])


def run_many() -> list[Driver]:
    return [run_with_random_faults(seed) for seed in range(20)]


def test_random_faults_change_no_output() -> None:
    num_kept = [driver.scheduler.stats.num_retained_tokens for driver in run_many()]
    assert np.count_nonzero(num_kept) > 8


@pytest.mark.parametrize("tier", ["device", "host"])
def test_random_faults_find_trust_in_steps_in_flight(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant: blocks that steps in flight fill keep their content."""
    take = PendingFills.take

    def take_one(fills: PendingFills) -> tuple[set[int], set[int]]:
        blocks, host_blocks = take(fills)
        return (set(), host_blocks) if tier == "device" else (blocks, set())

    monkeypatch.setattr(PendingFills, "take", take_one)
    with pytest.raises(AssertionError, match="foreign KV"):
        run_many()


@pytest.mark.parametrize(("kept", "num_commands"), [(KvTiers.ALL, 1), (KvTiers.HOST, 2), (KvTiers.NONE, 2)])
def test_weights_are_loaded_again_by_new_ranks_only(kept: KvTiers, num_commands: int) -> None:
    driver = Driver(small_config())
    driver.scheduler.control.order(EngineCommand(Action.UPDATE_WEIGHTS, path="/new", version="2"), None)
    driver.run()
    driver.lose_ranks(kept=kept)
    driver.add(0, random_prompt(9), max_tokens=4, ignore_eos=True)
    driver.run()
    assert [command.version for command in driver.group.commands] == ["2"] * num_commands
    assert driver.outputs[0] == oracle(random_prompt(9), 4, stops=())
