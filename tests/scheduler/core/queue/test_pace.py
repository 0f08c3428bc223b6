"""Times of steps and lengths of outputs that are learned."""

from __future__ import annotations

import pytest

from quire.scheduler.core.queue.pace import Pace


def pace_of(*steps_s: float) -> Pace:
    pace = Pace()
    for seconds in steps_s:
        pace.observe_step(seconds)
    return pace


def test_first_steps_count_alike() -> None:
    pace = pace_of(0.01, 0.02, 0.03)
    assert pace.step_s == pytest.approx(0.02)
    assert pace.least_step_s == pytest.approx(0.01, rel=0.01)


def test_launched_step_is_counted_with_the_next_one_that_is_done() -> None:
    pace = Pace()
    for _ in range(50):
        pace.observe_step(0.001, is_done=False)
        pace.observe_step(0.2)
    assert pace.step_s == pytest.approx(0.1)
    assert pace.least_step_s == pytest.approx(0.1)


def test_step_without_a_time_of_its_own_is_counted_with_the_next_one() -> None:
    assert pace_of(0.0, 0.2, 0.0, 0.2).step_s == pytest.approx(0.1)


def test_replica_that_becomes_slow_is_noticed_within_20_steps() -> None:
    pace = pace_of(*[0.01] * 100, *[0.03] * 20)
    assert pace.step_s > 0.02


def test_one_interrupted_step_teaches_little() -> None:
    assert pace_of(*[0.01] * 100, 60.0).step_s < 0.02


def test_shortest_step_follows_a_model_whose_steps_become_longer() -> None:
    assert pace_of(0.01, *[0.03] * 20_000).least_step_s == pytest.approx(0.03)


def observe(*ends: tuple[int, bool]) -> Pace:
    pace = Pace()
    for num_tokens, has_stopped in ends:
        pace.observe_output(num_tokens, has_stopped)
    return pace


def test_mean_of_stopped_outputs_is_expected() -> None:
    pace = observe((10, True), (20, True), (30, True))
    assert pace.expect_tokens(1000, may_stop=True) == pytest.approx(20.0, rel=0.01)
    assert pace.expect_tokens(5, may_stop=True) == 5.0
    assert pace.expect_tokens(1000, may_stop=False) == 1000.0


def test_output_that_ended_by_its_limit_would_have_been_longer() -> None:
    assert observe((16, False), (16, False)).expect_tokens(400, may_stop=True) == 400.0
    assert observe((10, True), (20, False)).expect_tokens(400, may_stop=True) == pytest.approx(30.0, rel=0.01)


def test_nothing_is_expected_before_the_first_end() -> None:
    assert Pace().expect_tokens(100, may_stop=True) == 0.0


def test_only_the_latest_outputs_count() -> None:
    pace = observe(*[(1000, True)] * 100, *[(10, True)] * 2000)
    assert pace.expect_tokens(5000, may_stop=True) == pytest.approx(10.0, rel=0.1)
