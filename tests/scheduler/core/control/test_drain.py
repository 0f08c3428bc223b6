"""A draining scheduler hands off all sequences, and moved sequences get the same tokens as sequences that stay."""

from typing import Any

import pytest
from driver import Driver
from fakes import EOS, beam_oracle, oracle, random_prompt, small_config
from narrowing import not_none

from quire.proto.stream import FinishReason


def receive(driver: Driver) -> None:
    """Record the messages in the outbox, without a step."""
    driver.record(driver.scheduler.take_outgoing())


def test_drain_hands_off_waiting_requests_and_lets_running_ones_finish() -> None:
    driver = Driver(small_config(max_num_seqs=2))
    for handle in range(4):
        driver.add(handle, random_prompt(5, handle), max_tokens=6, ignore_eos=True)
    driver.step()
    driver.scheduler.drain(grace_s=10.0, now=0.0)
    driver.step()
    assert set(driver.moved) == {2, 3}
    driver.run(depth=2)
    assert set(driver.finishes) == {0, 1}
    assert not driver.scheduler.has_work
    assert driver.scheduler.blocks.num_held_blocks == 0


def test_draining_scheduler_moves_each_output_of_new_requests() -> None:
    driver = Driver(small_config())
    driver.scheduler.drain(grace_s=10.0, now=0.0)
    driver.add(0, random_prompt(4), n=3)
    driver.add(3, random_prompt(4), n=1, best_of=2)
    receive(driver)
    assert set(driver.moved) == set(range(5))
    assert {finish.reason for finish in driver.moved.values()} == {FinishReason.MOVED}
    assert not driver.scheduler.has_work


def test_drain_hands_off_running_requests_after_the_grace_time() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(5), max_tokens=30, ignore_eos=True)
    for _ in range(4):
        driver.step(depth=2)
    driver.scheduler.drain(grace_s=1.0, now=0.0)
    driver.step(depth=2)
    assert not driver.moved
    driver.now = 1.0
    driver.run(depth=2)
    assert driver.moved[0].num_completion_tokens == len(driver.outputs[0]) > 4
    assert driver.moved[0].num_prompt_tokens == 5
    driver.replace()


def test_drain_uses_the_shorter_of_two_grace_times() -> None:
    driver = Driver(small_config())
    driver.add(0, random_prompt(5), max_tokens=30, ignore_eos=True)
    driver.step()
    driver.scheduler.drain(grace_s=0.0, now=0.0)
    driver.scheduler.drain(grace_s=60.0, now=0.0)
    driver.step()
    assert 0 in driver.moved


@pytest.mark.parametrize("best_of", [None, 3])
def test_outputs_of_a_best_of_request_are_handed_off_together(best_of: int | None) -> None:
    """With two rows the third output waits for another to end: alone it is handed off, in a group it stays."""
    driver = Driver(small_config(max_num_seqs=2))
    driver.add(
        0, random_prompt(5), max_tokens=6, n=3 if best_of is None else 1, best_of=best_of, ignore_eos=True
    )
    driver.step()
    driver.step()
    driver.scheduler.drain(grace_s=10.0, now=0.0)
    driver.run()
    assert set(driver.moved) == ({2} if best_of is None else set())
    driver.replace()


def test_beam_search_is_handed_off_whole_and_restarts() -> None:
    driver = Driver(small_config())
    settings: dict[str, Any] = {"max_tokens": 8, "n": 2, "beam_width": 3}
    driver.add(0, random_prompt(5), **settings)
    for _ in range(3):
        driver.step()
    driver.scheduler.drain(grace_s=0.0, now=0.0)
    driver.run()
    assert set(driver.moved) == {0, 1}
    driver.replace()
    driver.add(0, random_prompt(5), **settings)
    driver.run()
    assert [driver.outputs[0], driver.outputs[1]] == beam_oracle(random_prompt(5), 8, 3, 2, (EOS,))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_moves", [1, 5])
def test_moved_sequence_continues_with_same_tokens(num_moves: int, depth: int) -> None:
    driver = Driver(small_config())
    settings: dict[str, Any] = {"max_tokens": 25, "min_tokens": 3, "ignore_eos": True}
    driver.add(0, random_prompt(7), **settings)
    for _ in range(num_moves):
        for _ in range(3):
            driver.step(depth)
        driver.scheduler.drain(grace_s=0.0, now=driver.now)
        driver.run(depth)
        driver.replace()
        driver.add(0, random_prompt(7), generated=driver.outputs[0], **settings)
    driver.run(depth)
    assert driver.outputs[0] == oracle(random_prompt(7), 25, stops=())
    finish = driver.finishes[0]
    assert (finish.reason, finish.num_prompt_tokens, finish.num_completion_tokens) == (
        FinishReason.LENGTH,
        7,
        25,
    )


def test_moved_sequence_counts_lengths_from_its_beginning() -> None:
    driver = Driver(small_config())
    generated = oracle(random_prompt(6), 5, stops=())
    driver.add(0, random_prompt(6), generated=generated, max_tokens=9, min_tokens=7, seed=3, temperature=1.0)
    driver.plan()
    (new,) = driver.plans[0].new
    assert new.token_ids.tolist() == random_prompt(6) + generated
    assert new.sampling.seed == 3
    guard = driver.scheduler._state.running[0]
    assert (guard.num_prompt_tokens, guard.max_len) == (6, 15)
    driver.apply_result()
    driver.run()
    assert len(driver.outputs[0]) <= 4


def test_moved_sequence_goes_before_new_ones_and_reports_recomputed_tokens() -> None:
    driver = Driver(small_config(max_num_seqs=1))
    driver.add(0, random_prompt(5), max_tokens=2, ignore_eos=True)
    driver.add(
        1,
        random_prompt(6, 1),
        generated=oracle(random_prompt(6, 1), 4, stops=()),
        max_tokens=6,
        ignore_eos=True,
    )
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
def test_invalid_moved_sequence_is_rejected(settings: dict[str, Any], problem: str | None) -> None:
    driver = Driver(small_config())
    rejection = driver.add(0, random_prompt(4), generated=[5, 6, 7], **settings)
    if problem is None:
        assert rejection is None
    else:
        assert problem in not_none(rejection).error
    driver.run()
    assert driver.scheduler.blocks.num_held_blocks == 0
