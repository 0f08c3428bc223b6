"""Simulated fleet and scaling policies of the autoscaling benchmark."""

from collections.abc import Callable

import pytest
from narrowing import not_none

from benchmarks.autoscale import FleetRun, OngoingRequests, run_policy, shift_of, smallest_fixed
from benchmarks.replay import ReplicaModel, roofline
from benchmarks.trace import Trace
from quire.cluster.config.deployment import ScalingLimits
from quire.cluster.fleet.controller.autoscaler import FleetSnapshot, ReplicaSample
from quire.cluster.fleet.controller.fleet_state import ReplicaState
from quire.cluster.simulation.fleet import autoscaling
from quire.cluster.simulation.traces import TracedRequest

# 1000 prompt tokens per second; memory bandwidth never limits a step.
MODEL = ReplicaModel(
    roofline(
        flops_per_token=1.0, flops_per_s=1000.0, weight_bytes=0.0, kv_bytes_per_token=0.0, bytes_per_s=1.0
    ),
    max_num_batched_tokens=100,
    num_blocks=625,
    cold_start_s=20.0,
)


def make_trace(*arrivals: float, num_prompt_tokens: int = 1000, num_output_tokens: int = 1) -> Trace:
    return Trace(
        "made",
        tuple(
            TracedRequest(number, at, num_prompt_tokens, num_output_tokens)
            for number, at in enumerate(arrivals)
        ),
    )


def run(trace: Trace, policy: Callable[[FleetSnapshot], int], num_replicas: int) -> FleetRun:
    return run_policy(trace, policy, MODEL, num_replicas)


def replicas_at(run: FleetRun, time_s: float) -> int:
    return [replicas for at, replicas, _ in run.history if at <= time_s][-1]


class TestFleetModel:
    def test_one_replica_serves_prompts_one_after_the_other(self) -> None:
        done = run(make_trace(0.0, 0.0, 0.0, 10.0), lambda _: 1, 1)
        assert [request.first_token_s for request in done.requests] == pytest.approx([1.0, 2.0, 3.0, 11.0])
        assert [request.wait_s for request in done.requests] == pytest.approx([0.0, 0.9, 1.9, 0.0]), (
            "a step is planned while its predecessor runs"
        )
        assert done.within(1.5) == 0.75

    def test_decoding_sequences_reduce_the_prefill_tokens_of_a_step(self) -> None:
        """A step of 0.1 s has 100 tokens: the second prompt, beside one decode, gets 99 of them."""
        done = run(make_trace(0.0, 5.0, num_prompt_tokens=990, num_output_tokens=100), lambda _: 1, 1)
        first, second = done.requests
        assert first.first_token_s == pytest.approx(0.99)
        assert not_none(second.first_token_s) - second.traced.arrival_s < 1.2

    def test_request_waits_until_its_kv_fits(self) -> None:
        trace = make_trace(0.0, 0.0, num_prompt_tokens=6000, num_output_tokens=50)
        first, second = run(trace, lambda _: 1, 1).requests
        assert second.wait_s > not_none(first.first_token_s)

    def test_replica_is_ready_after_its_cold_start_and_gets_waiting_requests(self) -> None:
        done = run(make_trace(0.0, 30.0), lambda snapshot: 1, 0)
        assert done.requests[0].wait_s == pytest.approx(20.0)
        assert done.replica_seconds == pytest.approx(31.0, abs=1.0)


class TestPolicies:
    def test_quire_policy_follows_a_step_in_load(self) -> None:
        steady = [second / 2 for second in range(1200)]
        trace = make_trace(*steady, *[200 + second / 2 for second in range(600)])
        trace = Trace("step", tuple(sorted(trace.requests, key=lambda each: each.arrival_s)))
        limits = ScalingLimits(
            max_replicas=10, target_wait_s=5.0, target_use=0.85, down_delay_s=60.0, cooldown_s=5.0
        )
        done = run(trace, autoscaling(limits), 3)
        assert replicas_at(done, 190) == 3
        assert replicas_at(done, 480) in (5, 6)
        assert replicas_at(done, 590) <= 4
        assert done.within(5.0) > 0.9

    def test_ongoing_requests_policy_applies_its_delays(self) -> None:
        policy = OngoingRequests(max_replicas=10).policy()
        busy = (ReplicaSample(ReplicaState.READY, num_requests=6),)
        targets = [policy(FleetSnapshot(float(second), busy)) for second in range(40)]
        assert targets[:30] == [1] * 30
        assert targets[30:] == [3] * 10

    def test_smallest_fixed_fleet_meets_the_target(self) -> None:
        trace = make_trace(*[second / 3.5 for second in range(350)])
        size, done = smallest_fixed(trace, MODEL)
        assert size == 4
        assert done.within(10.0) >= 0.99


class TestTraces:
    def test_shift_rises_and_falls_once(self) -> None:
        shift = shift_of(make_trace(*[float(second) for second in range(600)]))
        hours = [0] * 8
        for request in shift.requests:
            hours[int(request.arrival_s // 3600)] += 1
        assert hours[0] < hours[1] < hours[2] < hours[3] <= 3600
        assert hours[4] > hours[5] > hours[6] > hours[7]
        assert shift == shift_of(make_trace(*[float(second) for second in range(600)]))
