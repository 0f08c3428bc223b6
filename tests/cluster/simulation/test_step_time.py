"""Times of steps: terms of a roofline, and the fit that finds their coefficients again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.cluster.simulation.step_time import (
    Coefficients,
    Device,
    ModelCost,
    StepTime,
    fit_coefficients,
    read_coefficients,
    relative_errors,
    write_coefficients,
)
from quire.proto.errors import ConfigError
from quire.scheduler import MeasuredStep, StepWork

DEVICE = Device("cpu", 1e11, 1e10, 5e9, 1e-4)
COST = ModelCost(1e8, 5e7, 2e4, flops_per_pair=2e4, num_all_reduces=12, all_reduce_bytes_per_token=1e3)
TRUE = Coefficients(
    2e-3, 5e-5, 1e-3, 3e-4, 4e-4, weights=1.3, flops=1.7, kv=1.5, attention=3.0, all_reduce=2.0
)


def works() -> list[StepWork]:
    rng = np.random.default_rng(0)
    decodes = [
        StepWork(n, n, n * int(rng.integers(1, 2000)), 0, n % 3, n % 5)
        for n in rng.integers(1, 64, 150).tolist()
    ]
    chunks = [
        StepWork(c, 1, done + c, c * done + c * c // 2)
        for c, done in rng.integers(1, 2048, (150, 2)).tolist()
    ]
    return decodes + chunks


def test_steps_are_limited_by_weights_or_by_arithmetic() -> None:
    ideal = StepTime(ModelCost(weight_bytes=1e9, flops_per_token=1e9, kv_bytes_per_token=0.0), DEVICE)
    assert ideal.seconds(StepWork(1, 1, 0)) == pytest.approx(0.1)
    assert ideal.seconds(StepWork(100, 1, 0)) == pytest.approx(1.0)


def test_few_tokens_read_few_experts() -> None:
    cost = ModelCost(0.0, 0.0, 0.0, expert_bytes=1e10, expert_share=0.25)
    step_time = StepTime(cost, DEVICE)
    assert step_time.seconds(StepWork(1, 1, 0)) == pytest.approx(0.25)
    assert step_time.seconds(StepWork(64, 64, 0)) == pytest.approx(1.0, rel=1e-6)


def test_fit_finds_the_coefficients_that_made_the_times() -> None:
    """The latency of all-reduces is in every step, as the fixed time is: only their sum can be known."""
    true = StepTime(COST, DEVICE, TRUE)
    steps = [MeasuredStep(work, true.seconds(work)) for work in works()]
    fitted = StepTime(COST, DEVICE, fit_coefficients(StepTime(COST, DEVICE), steps))
    assert np.abs(relative_errors(fitted, steps)).max() < 0.02
    assert fitted.coefficients.attention == pytest.approx(3.0, rel=0.1)
    assert fitted.coefficients.ended_s == pytest.approx(4e-4, rel=0.1)
    assert fitted.coefficients.kv == pytest.approx(1.5, rel=0.1)


def test_fit_keeps_the_coefficients_of_terms_that_no_step_has() -> None:
    alone = StepTime(ModelCost(1e8, 5e7, 2e4), DEVICE, TRUE)
    steps = [MeasuredStep(work, alone.seconds(work)) for work in works()]
    start = StepTime(alone.cost, DEVICE, Coefficients(all_reduce=7.0))
    assert fit_coefficients(start, steps).all_reduce == 7.0


def test_fit_needs_as_many_steps_as_coefficients() -> None:
    with pytest.raises(ConfigError, match="1 measured steps, must be at least 10"):
        fit_coefficients(StepTime(COST, DEVICE), [MeasuredStep(StepWork(1, 1, 1), 0.1)])


def test_coefficients_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    write_coefficients(path, "cpu", TRUE, {"steps": 300})
    assert read_coefficients(path, "cpu") == TRUE
    with pytest.raises(ConfigError, match="were measured on cpu, not on h100"):
        read_coefficients(path, "h100")
    path.write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_coefficients(path, "cpu")


def test_fit_ignores_steps_that_were_interrupted() -> None:
    true = StepTime(COST, DEVICE, TRUE)
    steps = [
        MeasuredStep(work, true.seconds(work) * (9.0 if number % 5 == 0 else 1.0))
        for number, work in enumerate(works())
    ]
    fitted = StepTime(COST, DEVICE, fit_coefficients(StepTime(COST, DEVICE), steps))
    undisturbed = [step for number, step in enumerate(steps) if number % 5]
    assert np.abs(relative_errors(fitted, undisturbed)).max() < 0.05
