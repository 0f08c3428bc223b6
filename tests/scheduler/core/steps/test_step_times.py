"""The deadline of a step follows the durations of earlier ones."""

import pytest

from quire.scheduler.core.steps.step_times import MIN_LATE_S, MIN_OVERDUE_S, UNMEASURED_S, StepTimes


def measured(*steps: tuple[int, float]) -> StepTimes:
    """Return times after steps of (tokens, seconds), one after the other."""
    times, now = StepTimes(), 0.0
    for num_tokens, seconds in steps:
        times.observe(num_tokens, now, now + seconds)
        now += seconds
    return times


def test_first_step_has_a_long_deadline() -> None:
    assert StepTimes().deadlines(1, 10.0).failed_s == UNMEASURED_S


def test_short_steps_have_the_least_deadline() -> None:
    deadlines = measured((16, 0.01)).deadlines(16, 10.0)
    assert deadlines.expected_s == pytest.approx(0.01)
    assert deadlines.late_s == MIN_LATE_S
    assert deadlines.failed_s == pytest.approx(0.01 + MIN_OVERDUE_S)


def test_long_prefill_is_not_hung() -> None:
    deadlines = measured((16, 0.01), (2048, 8.0)).deadlines(2048, 10.0)
    assert deadlines.late_s == pytest.approx(18.0)
    assert deadlines.failed_s == pytest.approx(18.0)


def test_option_bounds_the_wait_beyond_the_prediction() -> None:
    assert measured((16, 0.01)).deadlines(16, 2.0).failed_s == pytest.approx(2.01)


def test_larger_step_is_predicted_in_proportion() -> None:
    assert measured((16, 0.5)).predict(64) == pytest.approx(2.0)


def test_smaller_step_is_predicted_as_the_next_larger() -> None:
    assert measured((64, 2.0), (1024, 9.0)).predict(3) == pytest.approx(2.0)


def test_prediction_rises_at_once_and_falls_slowly() -> None:
    assert measured((8, 1.0), (8, 3.0)).predict(8) == pytest.approx(3.0)
    assert measured((8, 3.0), (8, 1.0)).predict(8) == pytest.approx(2.8)


def test_overlapping_steps_count_from_the_end_of_the_step_before() -> None:
    times = StepTimes()
    times.observe(4, 0.0, 1.0)
    times.observe(4, 0.1, 1.5)  # planned while the first was computed
    assert times.began_at(0.2) == 1.5
    assert times.predict(4) == pytest.approx(0.95)
