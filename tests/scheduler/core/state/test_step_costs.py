"""Predicted times of steps."""

from __future__ import annotations

import itertools

import pytest

from quire.scheduler.core.state.step_costs import StepCosts


def measured(fixed_s: float, per_row_s: float, per_token_s: float) -> StepCosts:
    costs = StepCosts(max_rows=64, max_tokens=2048)
    for num_rows, num_tokens in itertools.product((1, 8, 16, 32, 64), (0, 100, 500, 2000)):
        costs.observe(num_rows, num_tokens, fixed_s + per_row_s * num_rows + per_token_s * num_tokens)
    return costs


def test_costs_of_rows_and_prompt_tokens_are_told_apart() -> None:
    costs = measured(0.005, 0.0001, 0.00002)
    assert costs.predict_s(40) == pytest.approx(0.009, rel=0.05)
    assert costs.predict_s(0, 1000) == pytest.approx(0.025, rel=0.05)
    assert costs.predict_s(10, 1500) == pytest.approx(0.036, rel=0.05)


def test_nothing_is_predicted_before_the_first_step() -> None:
    costs = StepCosts(64, 2048)
    assert costs.predict_s(10, 100) == 0.0
    assert not costs.has_measured
    costs.observe(0, 500, 0.001, is_done=False)  # only launched
    assert not costs.has_measured


def test_launched_step_is_counted_with_the_next_one_that_is_done() -> None:
    costs = StepCosts(64, 2048)
    for _ in range(50):
        costs.observe(0, 1024, 0.001, is_done=False)
        costs.observe(0, 1024, 0.2)
    assert costs.predict_s(0, 1024) == pytest.approx(0.1, rel=0.02)
    assert costs.mean_s == pytest.approx(0.1, rel=0.02)


def test_replica_that_becomes_slow_is_noticed_within_20_steps() -> None:
    costs = measured(0.005, 0.0001, 0.0)
    for _ in range(20):
        costs.observe(32, 0, 3 * 0.0082)
    assert costs.predict_s(32) > 2 * 0.0082


def test_one_interrupted_step_teaches_little() -> None:
    costs = measured(0.01, 0.0, 0.0)
    costs.observe(32, 0, 60.0)
    assert costs.predict_s(32) < 0.02


def test_no_cost_is_negative() -> None:
    costs = StepCosts(64, 2048)
    for num_rows in (1, 16, 64):
        costs.observe(num_rows, 0, 1.0 / num_rows)  # more rows, less time: noise of another kind
    assert costs.predict_s(64, 2048) >= costs.predict_s(0, 0) >= 0.0
