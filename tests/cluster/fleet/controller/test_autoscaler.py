"""`decide`: named cases, and properties that hold under any load."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cluster.config.deployment import ScalingLimits
from quire.cluster.fleet.controller.autoscaler import (
    NUM_WINDOWS,
    FleetSnapshot,
    ReplicaSample,
    ScalingState,
    decide,
)
from quire.cluster.fleet.controller.fleet_state import ReplicaState
from quire.proto.errors import ConfigError

READY, STARTING, DRAINING = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.DRAINING
TOKENS_PER_S = 1000.0
LIMITS = ScalingLimits(
    min_replicas=0,
    max_replicas=20,
    target_wait_s=5.0,
    target_use=1.0,
    target_memory_use=1.0,
    up_delay_s=0.0,
    down_delay_s=60.0,
    max_step_up=20,
    cooldown_s=0.0,
    idle_timeout_s=120.0,
)
BUSY = ReplicaSample(READY, num_requests=1, tokens_per_s=TOKENS_PER_S)


class Fleet:
    """Calls `decide` once per second; replicas are ready as soon as they are wanted."""

    def __init__(self, limits: ScalingLimits, num_replicas: int, cold_start_s: float = 10.0) -> None:
        self.limits, self.state, self.now = limits, ScalingState(), 0.0
        self.num_replicas, self.cold_start_s = num_replicas, cold_start_s
        self.targets: list[int] = []
        self.reason = ""

    def run(self, seconds: int, sample: ReplicaSample = BUSY, **observed: int) -> list[int]:
        """Return the targets of that many seconds with the same snapshot in each."""
        targets = []
        for _ in range(seconds):
            snapshot = FleetSnapshot(
                self.now, (sample,) * self.num_replicas, cold_start_s=self.cold_start_s, **observed
            )
            decision = decide(snapshot, self.limits, self.state)
            self.state, self.num_replicas, self.reason = decision.state, decision.target, decision.reason
            self.now += 1.0
            targets.append(decision.target)
        self.targets += targets
        return targets


class TestUp:
    def test_arrivals_are_divided_by_the_capacity_of_a_replica(self) -> None:
        fleet = Fleet(LIMITS, 4)
        assert fleet.run(300, arrived_requests=5, arrived_tokens=3500)[-1] == 4
        assert "arrive at" in fleet.reason

    def test_target_use_reduces_the_planned_capacity(self) -> None:
        fleet = Fleet(replace(LIMITS, target_use=0.5), 4)
        assert fleet.run(300, arrived_requests=5, arrived_tokens=3500)[-1] == 7

    def test_burst_may_wait_for_the_target(self) -> None:
        fleet = Fleet(LIMITS, 1)
        fleet.run(130, arrived_requests=0)
        # 20,000 tokens at once may take the target wait and the window that they arrived in: 10 s.
        assert fleet.run(1, arrived_requests=9, arrived_tokens=20_000) == [2]

    def test_backlog_longer_than_a_cold_start_adds_replicas(self) -> None:
        fleet = Fleet(LIMITS, 2)
        waiting = ReplicaSample(READY, queued_tokens=40_000, num_requests=9, tokens_per_s=TOKENS_PER_S)
        # In 10 s two replicas compute 20,000 of the 80,000 tokens; the others must be computed in 5 s.
        assert fleet.run(1, waiting) == [12]
        assert "wait" in fleet.reason

    def test_backlog_shorter_than_a_cold_start_adds_none(self) -> None:
        fleet = Fleet(LIMITS, 2, cold_start_s=60.0)
        waiting = ReplicaSample(READY, queued_tokens=20_000, num_requests=9, tokens_per_s=TOKENS_PER_S)
        assert fleet.run(1, waiting) == [2]

    @pytest.mark.parametrize("use", ["kv_use", "row_use"])
    def test_full_memory_adds_replicas_without_a_queue(self, use: str) -> None:
        fleet = Fleet(replace(LIMITS, target_memory_use=0.8), 2)
        full: dict[str, Any] = {use: 0.9}
        assert fleet.run(1, replace(BUSY, **full)) == [3]

    def test_long_wait_adds_one_replica_at_a_time(self) -> None:
        fleet, snapshot = Fleet(LIMITS, 2), FleetSnapshot(0.0, (replace(BUSY, oldest_wait_s=6.0),) * 2)
        first = decide(snapshot, fleet.limits, fleet.state)
        assert first.target == 3
        starting = (*snapshot.replicas, ReplicaSample(STARTING))
        second = decide(replace(snapshot, time_s=1.0, replicas=starting), LIMITS, first.state)
        assert second.target == 3, "the starting replica has to become ready first"

    def test_growth_is_extrapolated_over_a_cold_start(self) -> None:
        steady, growing = Fleet(LIMITS, 3, cold_start_s=60.0), Fleet(LIMITS, 3, cold_start_s=60.0)
        for second in range(125):
            steady.run(1, arrived_requests=1, arrived_tokens=2400)
            growing.run(1, arrived_requests=1, arrived_tokens=20 * second)
        assert steady.targets[-1] == 3
        assert growing.targets[-1] > 3, "2400 tokens per second now, 3600 in a minute"

    def test_bursts_are_not_taken_for_growth(self) -> None:
        fleet = Fleet(LIMITS, 5, cold_start_s=60.0)
        for second in range(240):
            fleet.run(1, arrived_requests=1, arrived_tokens=20_000 if second % 10 == 0 else 0)
        assert fleet.targets[-1] <= 3

    def test_target_rises_after_up_delay(self) -> None:
        fleet = Fleet(replace(LIMITS, up_delay_s=5.0), 1)
        assert fleet.run(8, replace(BUSY, kv_use=1.5)) == [1] * 5 + [2] * 3

    def test_spike_shorter_than_up_delay_is_ignored(self) -> None:
        fleet = Fleet(replace(LIMITS, up_delay_s=5.0), 1)
        for _ in range(10):
            fleet.run(3, replace(BUSY, kv_use=1.5))
            fleet.run(2)
        assert set(fleet.targets) == {1}

    def test_target_rises_by_limited_steps(self) -> None:
        fleet = Fleet(replace(LIMITS, max_step_up=3), 1)
        waiting = ReplicaSample(READY, queued_tokens=10**6, num_requests=9, tokens_per_s=TOKENS_PER_S)
        assert fleet.run(3, waiting) == [4, 7, 10]


class TestDown:
    def test_target_falls_after_down_delay_by_limited_steps(self) -> None:
        fleet = Fleet(replace(LIMITS, cooldown_s=10.0), 4)
        targets = fleet.run(100)
        assert targets[:60] == [4] * 60
        assert targets[60] == 3
        assert [second for second in range(1, 100) if targets[second] < targets[second - 1]] == [60, 70, 80]
        assert targets[-1] == 1, "not idle: a request runs"

    def test_recommendation_within_down_delay_keeps_replicas(self) -> None:
        fleet = Fleet(LIMITS, 4)
        for _ in range(5):
            fleet.run(50)
            fleet.run(2, replace(BUSY, kv_use=0.95))
        assert set(fleet.targets) == {4}

    def test_down_delay_begins_again_after_restart(self) -> None:
        fleet = Fleet(LIMITS, 4)
        fleet.run(55)
        fleet.state = ScalingState()
        assert fleet.run(59) == [4] * 59

    def test_draining_replicas_do_not_count(self) -> None:
        snapshot = FleetSnapshot(0.0, (BUSY, BUSY, ReplicaSample(DRAINING), ReplicaSample(STARTING)))
        assert decide(snapshot, LIMITS, ScalingState()).target == 3


class TestZero:
    IDLE = ReplicaSample(READY)

    def test_target_is_zero_after_idle_timeout(self) -> None:
        assert LIMITS.idle_timeout_s > LIMITS.down_delay_s > 0
        fleet = Fleet(LIMITS, 1)
        assert fleet.run(120, self.IDLE) == [1] * 120
        assert fleet.run(1, self.IDLE) == [0]
        assert "no request for 120 s" in fleet.reason

    def test_running_request_prevents_zero(self) -> None:
        fleet = Fleet(replace(LIMITS, down_delay_s=0.0), 1)
        assert set(fleet.run(500)) == {1}

    def test_new_model_stays_at_zero_without_requests(self) -> None:
        assert Fleet(LIMITS, 0).run(10) == [0] * 10

    def test_first_request_starts_a_replica_without_delay(self) -> None:
        fleet = Fleet(replace(LIMITS, up_delay_s=30.0), 0)
        fleet.run(500)
        assert fleet.run(
            1, arrived_requests=1, arrived_tokens=10, buffered_requests=1, buffered_tokens=10
        ) == [1]

    def test_buffered_tokens_count_while_there_is_no_replica(self) -> None:
        """Once the throughput of a replica is known, a large backlog starts more than one."""
        fleet = Fleet(replace(LIMITS, down_delay_s=0.0, idle_timeout_s=10.0), 1)
        fleet.run(10)
        fleet.run(20, self.IDLE)
        assert fleet.num_replicas == 0
        (target,) = fleet.run(1, arrived_requests=50, buffered_requests=50, buffered_tokens=50_000)
        assert 10 <= target <= 11, "50,000 tokens in 5 s, at 1000 per second or a little less"

    def test_min_replicas_are_kept(self) -> None:
        fleet = Fleet(replace(LIMITS, min_replicas=2), 3)
        assert fleet.run(1000, self.IDLE)[-1] == 2


class TestBounds:
    def test_new_bounds_apply_at_once(self) -> None:
        fleet = Fleet(LIMITS, 6)
        fleet.run(5)
        fleet.limits = replace(LIMITS, max_replicas=3)
        assert fleet.run(1) == [3]
        fleet.limits = replace(LIMITS, min_replicas=5)
        assert fleet.run(1) == [5]

    def test_reason_names_the_bound(self) -> None:
        fleet = Fleet(replace(LIMITS, max_replicas=2), 2)
        fleet.run(1, replace(BUSY, kv_use=3.0))
        assert "max_replicas is 2; 6 wanted" in fleet.reason

    @pytest.mark.parametrize(
        ("options", "word"),
        [
            ({"min_replicas": -1}, "min_replicas"),
            ({"min_replicas": 3, "max_replicas": 2}, "max_replicas"),
            ({"max_replicas": 0}, "max_replicas"),
            ({"target_wait_s": 0.0}, "target_wait_s"),
            ({"target_wait_s": math.nan}, "target_wait_s"),
            ({"target_use": 1.5}, "target_use"),
            ({"max_step_up": 0}, "max_step_up"),
            ({"up_delay_s": -1.0}, "up_delay_s"),
            ({"down_delay_s": math.inf}, "down_delay_s"),
            ({"idle_timeout_s": 0.0}, "idle_timeout_s"),
        ],
    )
    def test_invalid_limits_raise(self, options: dict[str, Any], word: str) -> None:
        with pytest.raises(ConfigError, match=word):
            ScalingLimits(**options)


shares = st.floats(0, 1)
samples = st.builds(
    ReplicaSample,
    state=st.sampled_from([READY, READY, STARTING, DRAINING]),
    queued_tokens=st.integers(0, 10**6),
    num_requests=st.integers(0, 200),
    kv_use=shares,
    row_use=shares,
    oldest_wait_s=st.floats(0, 1000),
    tokens_per_s=st.floats(0, 1e5),
)
snapshots = st.builds(
    FleetSnapshot,
    time_s=st.just(0.0),
    replicas=st.lists(samples, max_size=8).map(tuple),
    buffered_requests=st.integers(0, 100),
    buffered_tokens=st.integers(0, 10**6),
    arrived_requests=st.integers(0, 100),
    arrived_tokens=st.integers(0, 10**6),
    cold_start_s=st.none() | st.floats(0, 600),
)
limits = st.builds(
    lambda low, extra, **options: ScalingLimits(
        min_replicas=low, max_replicas=max(1, low + extra), **options
    ),
    st.integers(0, 4),
    st.integers(0, 20),
    target_wait_s=st.floats(0.1, 60),
    target_use=st.floats(0.1, 1),
    target_memory_use=st.floats(0.1, 1),
    up_delay_s=st.floats(0, 20),
    down_delay_s=st.floats(0, 60),
    max_step_up=st.integers(1, 5),
    max_step_down=st.integers(1, 5),
    cooldown_s=st.floats(0, 30),
    idle_timeout_s=st.floats(1, 60),
)


def at_times(observed: list[FleetSnapshot]) -> list[FleetSnapshot]:
    return [replace(snapshot, time_s=3.0 * number) for number, snapshot in enumerate(observed)]


@given(st.lists(snapshots, min_size=1, max_size=25), limits)
@settings(max_examples=60)
def test_bounds_and_step_limits_hold_for_any_snapshots(
    observed: list[FleetSnapshot], limits: ScalingLimits
) -> None:
    state, before = ScalingState(), None
    for snapshot in at_times(observed):
        decision = decide(snapshot, limits, state)
        assert limits.min_replicas <= decision.target <= limits.max_replicas
        assert decision.reason
        if before is not None:
            assert before - limits.max_step_down <= decision.target <= before + limits.max_step_up
        before, state = decision.target, decision.state
        assert len(state.windows) <= NUM_WINDOWS


@given(st.lists(snapshots, min_size=1, max_size=15), limits, st.integers(0, 10**6))
@settings(max_examples=60)
def test_larger_backlog_never_lowers_the_target(
    observed: list[FleetSnapshot], limits: ScalingLimits, more: int
) -> None:
    state = ScalingState()
    for snapshot in at_times(observed):
        worse = replace(snapshot, buffered_tokens=snapshot.buffered_tokens + more, buffered_requests=101)
        decision = decide(snapshot, limits, state)
        assert decide(worse, limits, state).target >= decision.target
        state = decision.state


@given(st.lists(snapshots, min_size=1, max_size=25), limits)
@settings(max_examples=60)
def test_last_replica_ends_only_after_idle_timeout(
    observed: list[FleetSnapshot], limits: ScalingLimits
) -> None:
    limits, state, busy_at = replace(limits, min_replicas=0), ScalingState(), -math.inf
    for snapshot in at_times(observed):
        if snapshot.arrived_requests or snapshot.buffered_requests:
            busy_at = snapshot.time_s
        had_some = bool(state.target)
        decision = decide(snapshot, limits, state)
        state = decision.state
        if had_some and decision.target == 0:
            assert snapshot.time_s - busy_at >= limits.idle_timeout_s


@given(samples, st.integers(1, 10), limits, st.integers(0, 5000))
@settings(max_examples=40, deadline=None)
def test_target_does_not_oscillate_under_constant_load(
    sample: ReplicaSample, num_replicas: int, limits: ScalingLimits, tokens: int
) -> None:
    """Under a load that is independent of the fleet's size the target moves in one direction at most, and settles."""
    fleet = Fleet(limits, num_replicas)
    sample = replace(sample, state=READY, oldest_wait_s=0.0, kv_use=0.0, row_use=0.0, queued_tokens=0)
    fleet.run(300, sample, arrived_requests=1, arrived_tokens=tokens)
    settled = fleet.targets[200:]
    steps = {(b > a) - (b < a) for a, b in pairwise(settled)} - {0}
    assert len(steps) <= 1
