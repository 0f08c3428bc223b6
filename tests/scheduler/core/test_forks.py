"""Parallel sampling and beam search: several outputs that share their prompt's blocks."""

from typing import Any

import pytest
from driver import Driver
from fakes import EOS, beam_oracle, constraint_for, oracle, random_prompt, small_config
from narrowing import not_none

from quire.proto.step import NewSequence


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 15])
def test_parallel_outputs_share_the_prompt_and_copy_one_block(length: int, depth: int) -> None:
    driver = Driver(small_config(num_blocks=64, max_num_batched_tokens=64, prefix_caching=False))
    driver.add(0, random_prompt(length), max_tokens=6, n=4, ignore_eos=True)
    driver.run(depth)
    for handle in range(4):
        assert driver.outputs[handle] == oracle(random_prompt(length), 6, stops=())
    assert sum(plan.copies.shape[0] for plan in driver.plans) == (3 if (length - 1) % 4 else 0)
    assert driver.group.num_executed_tokens <= length + 4 * 6 + 3 * depth


def test_parallel_outputs_hold_the_prompt_once() -> None:
    driver = Driver(small_config(num_blocks=64, max_num_batched_tokens=64, prefix_caching=False))
    driver.add(0, random_prompt(33), max_tokens=8, n=4, ignore_eos=True)
    driver.run()
    assert driver.scheduler.stats.peak_used_blocks <= 9 + 4 * 2


def test_outputs_without_a_free_row_wait() -> None:
    driver = Driver(small_config(max_num_seqs=2))
    driver.add(0, random_prompt(9), max_tokens=5, n=6, ignore_eos=True)
    driver.run(depth=2)
    assert all(driver.outputs[handle] == oracle(random_prompt(9), 5, stops=()) for handle in range(6))


def test_children_of_a_parent_that_ends_at_once_complete() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(9), max_tokens=1, n=3)
    driver.run()
    assert [driver.outputs[handle] for handle in range(3)] == [oracle(random_prompt(9), 1)] * 3


def test_each_output_samples_with_its_own_seed() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(9), max_tokens=3, n=3, seed=40, temperature=1.0, ignore_eos=True)
    driver.run()
    seeds = {new.sampling.seed for plan in driver.plans for new in plan.new}
    assert seeds == {40, 41, 42}


def test_one_output_can_be_aborted_alone() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(9), max_tokens=12, n=3, ignore_eos=True)
    driver.step()
    assert driver.abort(0)  # the parent, whose children have not started
    driver.run()
    assert driver.outputs[2] == oracle(random_prompt(9), 12, stops=())
    assert set(driver.finishes) == {1, 2}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_beam_search_equals_the_oracle(width: int, depth: int) -> None:
    driver = Driver(small_config(num_blocks=64))
    n = min(2, width)
    driver.add(0, random_prompt(9), max_tokens=10, beam_width=width, n=n)
    driver.run(depth)
    assert [driver.outputs[handle] for handle in range(n)] == beam_oracle(
        random_prompt(9), 10, width, n, (EOS,)
    )
    assert not_none(driver.finishes[0].score) >= not_none(driver.finishes[n - 1].score)


@pytest.mark.parametrize("num_blocks", [10, 12, 16])
def test_beam_searches_complete_with_too_few_blocks_and_rows(num_blocks: int) -> None:
    driver = Driver(small_config(num_blocks=num_blocks, max_num_seqs=4))
    for handle in range(0, 12, 2):
        driver.add(handle, random_prompt(7, handle), max_tokens=8, beam_width=4, n=2)
    driver.add(100, random_prompt(5), max_tokens=9, ignore_eos=True)
    driver.run(depth=2)
    for handle in range(0, 12, 2):
        expected = beam_oracle(random_prompt(7, handle), 8, 4, 2, (EOS,))
        assert [driver.outputs[handle], driver.outputs[handle + 1]] == expected
    assert driver.outputs[100] == oracle(random_prompt(5), 9, stops=())
    assert driver.scheduler.stats.num_preemptions > 0


def test_aborted_beam_search_frees_all_beams() -> None:
    driver = Driver(small_config(num_blocks=64))
    driver.add(0, random_prompt(9), max_tokens=20, beam_width=4, n=2, ignore_eos=True)
    for _ in range(6):
        driver.step()
    assert driver.scheduler.num_running + driver.scheduler.num_waiting == 4
    assert driver.abort(1)
    assert not driver.abort(0)
    driver.run()
    assert driver.scheduler.blocks.num_held_blocks == 0
    assert not driver.finishes


def started(driver: Driver) -> list[NewSequence]:
    return [new for plan in driver.plans for new in plan.new]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("settings", [{"n": 4}, {"n": 2, "beam_width": 4}])
def test_constraint_is_sent_once_and_forks_refer_to_their_parents(
    settings: dict[str, Any], depth: int
) -> None:
    driver = Driver(small_config(num_blocks=64))
    prompt = random_prompt(9)
    driver.add(0, prompt, max_tokens=10, constraint=constraint_for(prompt), **settings)
    driver.run(depth)
    first, *forks = started(driver)
    assert first.sampling.constraint == constraint_for(prompt)
    assert not first.takes_constraint
    assert len(forks) >= 3
    for fork in forks:
        assert fork.sampling.constraint is None
        assert fork.takes_constraint


@pytest.mark.parametrize("settings", [{"n": 4}, {"n": 2, "beam_width": 4}, {"n": 2, "best_of": 4}])
def test_forks_send_only_their_last_token(settings: dict[str, Any]) -> None:
    driver = Driver(small_config(num_blocks=64))
    driver.add(0, random_prompt(9), max_tokens=6, **settings)
    driver.run(depth=2)
    first, *forks = started(driver)
    assert (first.token_ids.size, first.source_row, first.takes_constraint) == (9, None, False)
    assert len(forks) >= 3
    assert {fork.token_ids.size for fork in forks} == {1}
    assert not any(fork.takes_constraint for fork in forks)


def test_forks_whose_penalties_count_tokens_send_them_all() -> None:
    driver = Driver(small_config(num_blocks=64))
    driver.add(0, random_prompt(9), max_tokens=4, n=3, presence_penalty=0.5, ignore_eos=True)
    driver.run()
    assert [(new.token_ids.size, new.num_source_tokens) for new in started(driver)] == [(9, 0)] * 3


def test_plan_of_eight_outputs_of_a_long_prompt_has_its_tokens_once() -> None:
    driver = Driver(
        small_config(num_blocks=1100, max_num_seqs=8, max_num_batched_tokens=4096, max_model_len=4100)
    )
    driver.add(0, random_prompt(4000), max_tokens=2, n=8, ignore_eos=True)
    driver.run()
    sizes = [len(plan.encode()) for plan in driver.plans if plan.new]
    assert sum(sizes) < 4 * 4000 * 5


def test_constraint_is_sent_again_to_outputs_whose_parent_does_not_run() -> None:
    driver = Driver(small_config(max_num_seqs=2))
    prompt = random_prompt(9)
    driver.add(0, prompt, max_tokens=5, n=4, ignore_eos=True, constraint=constraint_for(prompt))
    for _ in range(3):
        driver.step()
    driver.lose_ranks()
    driver.run(depth=2)
    sent = [new.sampling.constraint == constraint_for(prompt) for new in started(driver)]
    assert sum(sent) > 2
    assert all(driver.outputs[handle] == oracle(prompt, 5, stops=()) for handle in range(4))


def test_parent_is_not_preempted_by_the_plan_that_starts_its_fork() -> None:
    """The ranks empty released rows first; the fork would find no constraint."""
    driver = Driver(small_config(max_num_seqs=2, num_blocks=64, policy="priority"))
    prompt = random_prompt(9)
    driver.add(0, prompt, max_tokens=8, n=2, ignore_eos=True, constraint=constraint_for(prompt))
    driver.step()
    driver.add(2, random_prompt(5, 1), max_tokens=2, ignore_eos=True, priority=5)
    driver.run()
    fork = started(driver)[1]
    assert (fork.source_row, fork.takes_constraint) == (0, True)
    assert driver.scheduler.stats.num_preemptions > 0
    assert [driver.outputs[handle] for handle in range(2)] == [oracle(prompt, 8, stops=())] * 2
