"""StepFaults: what an operator's faults do to the steps of a rank."""

from __future__ import annotations

import numpy as np
import pytest

from quire.proto.codec import NO_INTS
from quire.proto.errors import InvalidRequest
from quire.proto.faults import Fault, FaultKind
from quire.proto.step import NewSequence, RowSampling, StepPlan
from quire.worker.rank.actor import InjectedFault, StepFaults


class Clock:
    """A clock that only sleeps move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def plan_with(*token_ids: int) -> StepPlan:
    tokens = np.array(token_ids, dtype=np.int32)
    return StepPlan(1, 1, 0, new=(NewSequence(0, 1, tokens, 0, NO_INTS, RowSampling()),))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faults(clock: Clock) -> StepFaults:
    return StepFaults(clock, clock.sleep)


def test_exception_fails_one_step(faults: StepFaults) -> None:
    faults.before_step(plan_with(1))
    faults.add(Fault(FaultKind.EXCEPTION))
    with pytest.raises(InjectedFault, match="an operator caused"):
        faults.before_step(plan_with(1))
    faults.before_step(plan_with(1))


def test_slow_delays_each_step_until_it_ends(faults: StepFaults, clock: Clock) -> None:
    faults.add(Fault(FaultKind.SLOW, delay_s=2.0, duration_s=3.0))
    delays = []
    for _ in range(3):
        before = clock.now
        faults.before_step(plan_with(1))
        delays.append(clock.now - before)
    assert delays == [2.0, 2.0, 0.0]


def test_poison_fails_steps_that_begin_a_sequence_with_the_token(faults: StepFaults, clock: Clock) -> None:
    faults.add(Fault(FaultKind.POISON, duration_s=10.0, token_id=7))
    faults.before_step(plan_with(1, 2))
    for _ in range(2):
        with pytest.raises(InjectedFault, match="poisoned token 7"):
            faults.before_step(plan_with(1, 7))
    clock.sleep(10.0)
    faults.before_step(plan_with(1, 7))


@pytest.mark.parametrize(
    ("kind", "values", "name"),
    [
        (FaultKind.SLOW, {"delay_s": 1.0}, "duration_s"),
        (FaultKind.SLOW, {"duration_s": 1.0}, "delay_s"),
        (FaultKind.POISON, {"duration_s": float("nan")}, "duration_s"),
        (FaultKind.SLOW, {"delay_s": 1.0, "duration_s": 1e9}, "duration_s"),
    ],
)
def test_fault_refuses_values_out_of_range(kind: FaultKind, values: dict[str, float], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        Fault(kind, **values)  # type: ignore[arg-type]
