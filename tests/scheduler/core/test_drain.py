"""A draining replica gives everything back, and what is taken over goes on as if it had never moved."""

from typing import Any

import numpy as np
import pytest
from driver import Driver
from fakes import EOS, VOCAB_SIZE, beam_oracle, oracle, small_config
from narrowing import not_none

from quire.proto.stream import FinishReason


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).tolist()


def told(driver: Driver) -> None:
    """Gives the scheduler a chance to say what it has to say, without computing anything."""
    driver._hear(driver.scheduler.take_outgoing())


def test_what_waits_is_given_back_at_once_and_what_runs_may_finish() -> None:
    driver = Driver(small_config(max_num_seqs=2))
    for handle in range(4):
        driver.add(handle, prompt(5, handle), max_tokens=6, ignore_eos=True)
    driver.step()
    driver.scheduler.drain(grace_s=10.0, now=0.0)
    driver.step()
    assert set(driver.moved) == {2, 3}
    driver.run(depth=2)
    assert set(driver.finishes) == {0, 1}
    assert not driver.scheduler.has_work
    assert driver.scheduler.blocks.num_held_blocks == 0


def test_what_comes_to_a_draining_replica_is_given_back_answer_for_answer() -> None:
    driver = Driver(small_config())
    driver.scheduler.drain(grace_s=10.0, now=0.0)
    driver.add(0, prompt(4), n=3)
    driver.add(3, prompt(4), n=1, best_of=2)
    told(driver)
    assert set(driver.moved) == set(range(5))
    assert {finish.reason for finish in driver.moved.values()} == {FinishReason.MOVED}
    assert not driver.scheduler.has_work


def test_what_runs_past_the_grace_is_given_back_with_its_account() -> None:
    driver = Driver(small_config())
    driver.add(0, prompt(5), max_tokens=30, ignore_eos=True)
    for _ in range(4):
        driver.step(depth=2)
    driver.scheduler.drain(grace_s=1.0, now=0.0)
    driver.step(depth=2)
    assert not driver.moved
    driver.now = 1.0
    driver.run(depth=2)
    assert driver.moved[0].num_completion_tokens == len(driver.answers[0]) > 4
    assert driver.moved[0].num_prompt_tokens == 5
    driver.replace()


def test_the_shorter_of_two_graces_counts() -> None:
    driver = Driver(small_config())
    driver.add(0, prompt(5), max_tokens=30, ignore_eos=True)
    driver.step()
    driver.scheduler.drain(grace_s=0.0, now=0.0)
    driver.scheduler.drain(grace_s=60.0, now=0.0)
    driver.step()
    assert 0 in driver.moved


@pytest.mark.parametrize("best_of", [None, 3])
def test_answers_of_which_the_best_are_given_stay_together(best_of: int | None) -> None:
    """With two rows the third answer waits for one of the others to end: alone it goes then, in a group it stays."""
    driver = Driver(small_config(max_num_seqs=2))
    driver.add(0, prompt(5), max_tokens=6, n=3 if best_of is None else 1, best_of=best_of, ignore_eos=True)
    driver.step()
    driver.step()
    driver.scheduler.drain(grace_s=10.0, now=0.0)
    driver.run()
    assert set(driver.moved) == ({2} if best_of is None else set())
    driver.replace()


def test_a_beam_search_is_given_back_whole_and_begins_anew() -> None:
    driver = Driver(small_config())
    settings: dict[str, Any] = {"max_tokens": 8, "n": 2, "beam_width": 3}
    driver.add(0, prompt(5), **settings)
    for _ in range(3):
        driver.step()
    driver.scheduler.drain(grace_s=0.0, now=0.0)
    driver.run()
    assert set(driver.moved) == {0, 1}
    driver.replace()
    driver.add(0, prompt(5), **settings)
    driver.run()
    assert [driver.answers[0], driver.answers[1]] == beam_oracle(prompt(5), 8, 3, 2, (EOS,))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_moves", [1, 5])
def test_a_moved_sequence_goes_on_exactly(num_moves: int, depth: int) -> None:
    driver = Driver(small_config())
    settings: dict[str, Any] = {"max_tokens": 25, "min_tokens": 3, "ignore_eos": True}
    driver.add(0, prompt(7), **settings)
    for _ in range(num_moves):
        for _ in range(3):
            driver.step(depth)
        driver.scheduler.drain(grace_s=0.0, now=driver.now)
        driver.run(depth)
        driver.replace()
        driver.add(0, prompt(7), generated=driver.answers[0], **settings)
    driver.run(depth)
    assert driver.answers[0] == oracle(prompt(7), 25, stops=())
    finish = driver.finishes[0]
    assert (finish.reason, finish.num_prompt_tokens, finish.num_completion_tokens) == (
        FinishReason.LENGTH,
        7,
        25,
    )


def test_limits_and_positions_of_a_moved_sequence_count_from_its_beginning() -> None:
    driver = Driver(small_config())
    generated = oracle(prompt(6), 5, stops=())
    driver.add(0, prompt(6), generated=generated, max_tokens=9, min_tokens=7, seed=3, temperature=1.0)
    driver.plan()
    (new,) = driver.plans[0].new
    assert new.token_ids.tolist() == prompt(6) + generated
    assert new.sampling.seed == 3
    guard = driver.scheduler._state.running[0]
    assert (guard.num_prompt_tokens, guard.max_len) == (6, 15)
    driver.take_result()
    driver.run()
    assert len(driver.answers[0]) <= 4


def test_a_moved_sequence_goes_before_new_ones_and_tells_what_was_recomputed() -> None:
    driver = Driver(small_config(max_num_seqs=1))
    driver.add(0, prompt(5), max_tokens=2, ignore_eos=True)
    driver.add(1, prompt(6, 1), generated=oracle(prompt(6, 1), 4, stops=()), max_tokens=6, ignore_eos=True)
    driver.run()
    assert list(driver.finishes) == [1, 0]
    assert driver.finishes[1].timings.recomputed_tokens == 9
    assert driver.finishes[0].timings.recomputed_tokens == 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"n": 2}, "are of one output"),
        ({"best_of": 2}, "are of one output"),
        ({"beam_width": 2}, "are of one output"),
        ({"max_tokens": 3}, "are 3 tokens, must be fewer than the 3"),
        ({"max_tokens": None}, None),
    ],
)
def test_what_cannot_be_taken_over_is_refused(settings: dict[str, Any], problem: str | None) -> None:
    driver = Driver(small_config())
    refusal = driver.add(0, prompt(4), generated=[5, 6, 7], **settings)
    if problem is None:
        assert refusal is None
    else:
        assert problem in not_none(refusal).error
    driver.run()
    assert driver.scheduler.blocks.num_held_blocks == 0
