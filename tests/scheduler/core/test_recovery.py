"""Sequences continue from their tokens after the ranks failed, and a request that fails them is found."""

from __future__ import annotations

import pytest
from driver import Driver
from fakes import EOS, beam_oracle, oracle, random_prompt, small_config

from quire.proto.errors import RankFailed, RequestQuarantined
from quire.scheduler.core.steps.quarantine import NUM_PROOF_STEPS, Quarantine

POISON = 63


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 7])
def test_outputs_are_those_of_an_undisturbed_run(num_steps: int, depth: int) -> None:
    driver = Driver(small_config(num_blocks=64, num_host_blocks=8, swap_blocks_per_s=1e9))
    driver.add(0, random_prompt(9), max_tokens=12, ignore_eos=True)
    driver.add(1, random_prompt(5, 1), max_tokens=12, n=3, ignore_eos=True)
    driver.add(4, random_prompt(7, 2), max_tokens=6, n=2, beam_width=3)
    driver.add(6, random_prompt(6, 3), max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    for _ in range(num_steps):
        driver.step(depth)
    driver.plan()  # its result never comes
    driver.lose_ranks()
    driver.run(depth)
    assert driver.outputs[0] == oracle(random_prompt(9), 12, stops=())
    assert [driver.outputs[handle] for handle in (1, 2, 3)] == [oracle(random_prompt(5, 1), 12, stops=())] * 3
    assert [driver.outputs[handle] for handle in (4, 5)] == beam_oracle(random_prompt(7, 2), 6, 3, 2, (EOS,))
    assert driver.outputs[6] == oracle(random_prompt(6, 3), 3, stops=())
    assert driver.scheduler.blocks.num_held_blocks == 0


def test_finish_counts_recoveries_and_their_time() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(9), max_tokens=4, ignore_eos=True)
    driver.step()
    driver.scheduler.interrupt(RankFailed(0, "killed"), driver.now)
    driver.now += 2.5
    driver.resume()
    driver.run()
    timings = driver.finishes[0].timings
    assert (timings.num_recoveries, timings.recovered_s) == (1, 2.5)
    assert timings.preempted_s == 0.0
    assert timings.recomputed_tokens == 9


def test_swapped_kv_is_recomputed() -> None:
    driver = Driver(
        small_config(num_blocks=8, num_host_blocks=8, swap_blocks_per_s=1e12, prefix_caching=False)
    )
    driver.add(0, random_prompt(12), max_tokens=12, ignore_eos=True)
    driver.add(1, random_prompt(12, 1), max_tokens=12, ignore_eos=True)
    while not any(sequence.host_blocks for sequence in driver.scheduler._state.alive.values()):
        driver.step()
    driver.lose_ranks()
    assert not any(sequence.host_blocks for sequence in driver.scheduler._state.alive.values())
    driver.run()
    assert driver.outputs[0] == oracle(random_prompt(12), 12, stops=())
    assert driver.outputs[1] == oracle(random_prompt(12, 1), 12, stops=())


def test_results_of_the_former_epoch_are_refused() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(9), max_tokens=4, ignore_eos=True)
    driver.step()
    driver.lose_ranks()
    plan = driver.plan()
    assert plan is not None
    assert plan.epoch == 2


def test_deadline_passes_during_a_recovery() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(9), max_tokens=4, timeout_s=5.0)
    driver.step()
    driver.scheduler.interrupt(RankFailed(0, "killed"), driver.now)
    driver.now += 6.0
    driver.scheduler.wait(driver.now)
    driver.record(driver.scheduler.take_outgoing())
    assert driver.finishes[0].error_reason == "DEADLINE_EXPIRED"


def run_with_poison(driver: Driver, *, is_step_error: bool) -> int:
    """Run to the end and lose the ranks at each step that the poisoned request is in; return how often."""
    driver.group.poison, driver.group.poison_is_step_error = POISON, is_step_error
    num_failures = 0
    while True:
        try:
            if not driver.step(depth=2):
                return num_failures
        except RankFailed as failure:
            num_failures += 1
            assert num_failures < 10, "the poisoned request is not found"
            driver.lose_ranks(is_step_error=failure.is_step_error, step_id=failure.step_id)


@pytest.mark.parametrize(("is_step_error", "most_failures"), [(True, 2), (False, 4)])
def test_poisoned_request_is_quarantined_and_the_others_complete(
    is_step_error: bool, most_failures: int
) -> None:
    driver = Driver(small_config(num_blocks=128, max_num_batched_tokens=64))
    prompts = [[2 + number, 3, 4, 5, 6, 7, 8] for number in range(6)]
    for handle, prompt in enumerate(prompts):
        poisoned = [POISON, *prompt] if handle == 3 else prompt
        driver.add(handle, poisoned, max_tokens=10, ignore_eos=True, stop_token_ids=(POISON,))
    assert run_with_poison(driver, is_step_error=is_step_error) <= most_failures
    error = driver.finishes.pop(3).to_error()
    assert isinstance(error, RequestQuarantined)
    assert "request-3 failed the ranks repeatedly, at last alone" in str(error)
    for handle in driver.finishes:
        assert driver.outputs[handle] == oracle(prompts[handle], 10, stops=(POISON,))
    assert sorted(driver.finishes) == [0, 1, 2, 4, 5]


def test_poisoned_beam_search_is_quarantined_as_a_whole() -> None:
    driver = Driver(small_config(num_blocks=128, max_num_batched_tokens=64))
    driver.add(0, [5, 6, 7], max_tokens=8, ignore_eos=True, stop_token_ids=(POISON,))
    driver.add(1, [POISON, 6, 7], max_tokens=8, n=2, beam_width=3, stop_token_ids=(POISON,))
    assert run_with_poison(driver, is_step_error=True) == 2
    assert {driver.finishes[handle].error_reason for handle in (1, 2)} == {"REQUEST_QUARANTINED"}
    assert driver.outputs[0] == oracle([5, 6, 7], 8, stops=(POISON,))


def test_trial_without_room_is_given_up() -> None:
    driver = Driver(small_config(num_blocks=9, prefix_caching=False, max_num_batched_tokens=64))
    for handle in range(3):
        driver.add(handle, random_prompt(8, handle), max_tokens=16, ignore_eos=True)
    driver.step()
    driver.lose_ranks(is_step_error=True)
    driver.run()
    for handle in range(3):
        assert driver.outputs[handle] == oracle(random_prompt(8, handle), 16, stops=())


def on_trial(quarantine: Quarantine) -> int | None:
    return quarantine.on_trial


def test_kills_without_progress_between_quarantine_nothing_at_once() -> None:
    quarantine = Quarantine()
    assert quarantine.on_failure([1, 2], is_step_error=False) is None
    assert on_trial(quarantine) is None
    assert quarantine.on_failure([1, 2], is_step_error=False) is None
    assert on_trial(quarantine) == 1
    assert quarantine.on_failure([1], is_step_error=False) is None  # may have had another reason
    assert quarantine.on_failure([1], is_step_error=False) == 1
    assert on_trial(quarantine) == 2


def test_suspects_that_make_progress_are_cleared() -> None:
    quarantine = Quarantine()
    quarantine.on_failure([1, 2], is_step_error=True)
    assert on_trial(quarantine) == 1
    for _ in range(NUM_PROOF_STEPS):
        quarantine.on_sampled([1])
    assert on_trial(quarantine) == 2
    quarantine.forget_ended([1])
    assert on_trial(quarantine) is None
    assert not quarantine.is_active
