"""Calibration: probes on ranks of known speed give back their coefficients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.replay import ReplicaModel
from quire.cluster.simulation.calibration import Probe, measure_steps, mixture, probes
from quire.cluster.simulation.replica import SimulatedClock, SimulatedRanks
from quire.cluster.simulation.step_time import (
    Coefficients,
    Device,
    ModelCost,
    StepTime,
    fit_coefficients,
    relative_errors,
)

TRUE = StepTime(
    ModelCost(4e7, 1e7, 2e4, flops_per_pair=2e4),
    Device("cpu", 1e11, 1e10, 1.0),
    Coefficients(1e-3, 3e-5, 2e-3, 1e-3, weights=1.2, flops=2.0, kv=1.7, attention=4.0),
)
MODEL = ReplicaModel(num_blocks=2000, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=2048)


def test_probes_keep_the_limits_of_the_engine() -> None:
    config = MODEL.config()
    found = list(probes(config))
    assert {probe.num_sequences for probe in found} == {1, 2, 4, 8, 16}
    for probe in found:
        length = probe.num_prompt_tokens + probe.num_output_tokens
        assert length <= config.max_servable_tokens
        assert probe.num_sequences * (length + config.cache.block_size) <= 16 * 2000


def test_mixture_keeps_the_limits_of_the_engine() -> None:
    config = MODEL.config()
    for num_running, probe in mixture(config):
        assert 1 <= num_running <= config.scheduler.max_num_seqs
        assert probe.num_prompt_tokens + probe.num_output_tokens <= config.max_servable_tokens


@pytest.mark.parametrize("repeats", [1, 2])
def test_steps_of_an_engine_are_measured_one_by_one(repeats: int) -> None:
    clock, seen = SimulatedClock(), list[Probe]()
    ranks = SimulatedRanks(MODEL.max_num_seqs, clock, TRUE)
    steps = measure_steps(MODEL.config(), ranks, repeats, clock, seen.append)
    each = [*probes(MODEL.config()), *mixture(MODEL.config())]
    assert len(seen) == repeats * len(each)
    assert np.abs(relative_errors(TRUE, steps)).max() < 1e-9
    assumed = replace(TRUE, coefficients=Coefficients())
    fitted = replace(TRUE, coefficients=fit_coefficients(assumed, steps))
    assert np.abs(relative_errors(fitted, steps)).max() < 0.02
    assert fitted.coefficients.kv == pytest.approx(1.7, rel=0.05)
    assert fitted.coefficients.new_s == pytest.approx(1e-3, rel=0.05)
