"""SimulatedFleet: replicas start, drain and share requests as in a real fleet; equal runs are equal."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from benchmarks.replay import Ended, ReplicaModel, roofline
from quire.cluster.fleet.controller.autoscaler import FleetSnapshot
from quire.cluster.simulation.distribution import Distribution
from quire.cluster.simulation.fleet import (
    Choose,
    FleetCost,
    Policy,
    PrefillRole,
    SimulatedFleet,
    SimulatedRequest,
)
from quire.cluster.simulation.traces import TracedRequest

# 1,000 tokens per second, and 0.1 s for any step of up to 100 tokens.
MODEL = ReplicaModel(
    roofline(
        flops_per_token=1.0, flops_per_s=1000.0, weight_bytes=0.1, kv_bytes_per_token=0.0, bytes_per_s=1.0
    ),
    num_blocks=2000,
    max_num_batched_tokens=100,
    cold_start_s=5.0,
)


def serve(
    requests: list[TracedRequest],
    *,
    num_replicas: int = 1,
    policy: Policy | None = None,
    choose: Choose | None = None,
    drain_grace_s: float = 1.0,
    model: ReplicaModel = MODEL,
) -> tuple[list[SimulatedRequest], FleetCost]:
    ended = Ended()
    fleet = SimulatedFleet(
        model.config(), model.step_time, ended, num_replicas=num_replicas, policy=policy,
        cold_start_s=model.cold_start_s, choose=choose, drain_grace_s=drain_grace_s,
    )  # fmt: skip
    cost = fleet.run(requests)
    return sorted(ended.requests, key=lambda request: request.traced.number), cost


def shrink_at(time_s: float) -> Policy:
    def policy(snapshot: FleetSnapshot) -> int:
        return 2 if snapshot.time_s < time_s else 1

    return policy


def alternate() -> Choose:
    numbers = count()
    return lambda hashes, loads: list(loads)[next(numbers) % len(loads)]


@pytest.mark.parametrize("shares", [True, False])
def test_equal_runs_are_equal(shares: bool) -> None:
    requests = [
        TracedRequest(n, 0.3 * n, 40 + n % 7, 5 + n % 11, tuple(range(n % 3, n % 3 + 3)) if shares else ())
        for n in range(60)
    ]
    assert serve(requests, num_replicas=3) == serve(requests, num_replicas=3)


def test_draining_replica_hands_its_running_requests_over() -> None:
    requests = [TracedRequest(n, 0.0, 20, 100) for n in range(2)]
    ended, cost = serve(requests, num_replicas=2, policy=shrink_at(3.0), choose=alternate())
    assert [request.num_received for request in ended] == [100, 100]
    assert len({request.replica_id for request in ended}) == 1, "one was moved"
    assert cost.history[-2][1:] == (1, 1)
    ends = [request.ended_at for request in ended]
    assert ends == pytest.approx([10.0, 10.0], abs=0.5), "moved at 4 s, and computed again in a step or two"


def test_draining_replica_keeps_requests_that_end_within_its_grace_period() -> None:
    requests = [TracedRequest(n, 0.0, 20, 40) for n in range(2)]
    ended, _ = serve(requests, num_replicas=2, policy=shrink_at(3.0), choose=alternate(), drain_grace_s=10.0)
    assert len({request.replica_id for request in ended}) == 2


def test_requests_wait_for_the_first_replica() -> None:
    ended, cost = serve([TracedRequest(0, 1.0, 10, 2)], num_replicas=0, policy=lambda snapshot: 1)
    assert ended[0].wait_s == pytest.approx(4.0)
    assert cost.most_replicas == 1


def test_router_sends_shared_prefixes_to_the_same_replica() -> None:
    requests = [
        TracedRequest(n, 2.0 * n, 64, 3, tuple(1000 * (n % 4) + block for block in range(4)))
        for n in range(40)
    ]
    ended, _ = serve(requests, num_replicas=4)
    homes = {family: {ended[n].replica_id for n in range(family, 40, 4)} for family in range(4)}
    assert all(len(home) == 1 for home in homes.values())
    assert sum(request.num_cached_tokens for request in ended) > 0.8 * 40 * 48


def test_requests_of_a_full_queue_fail() -> None:
    model = replace(MODEL, max_num_seqs=1, max_queue_len=2)
    requests = [TracedRequest(n, 0.0, 50, 10) for n in range(6)]
    with pytest.raises(AssertionError, match="a request failed"):
        serve(requests, model=model)


def test_quantiles_of_a_distribution_are_exact_to_its_buckets() -> None:
    distribution = Distribution()
    for number in range(1, 1001):
        distribution.add(number / 100)
    assert distribution.quantile(0.5) == pytest.approx(5.0, rel=0.004)
    assert distribution.quantile(0.99) == pytest.approx(9.9, rel=0.004)
    assert distribution.mean == pytest.approx(5.005)
    low, high = distribution.interval(0.5)
    assert low < 5.0 < high
    assert Distribution().quantile(0.5) == 0.0


# As MODEL, with steps of 0.01 s for a few tokens: a chunk of a prompt delays the sequences that run.
FAST_STEPS = replace(
    MODEL,
    step_time=roofline(
        flops_per_token=1.0, flops_per_s=1000.0, weight_bytes=0.01, kv_bytes_per_token=0.0, bytes_per_s=1.0
    ),
    prefix_caching=True,
)


def with_roles(prefill: PrefillRole, num_requests: int = 40) -> tuple[list[SimulatedRequest], FleetCost]:
    """Serve short prompts, and long ones among them, on two decode replicas and one for prompts."""
    requests = [TracedRequest(n, 0.2 * n, 400 if n % 4 == 3 else 20, 60) for n in range(num_requests)]
    ended = Ended()
    fleet = SimulatedFleet(FAST_STEPS.config(), FAST_STEPS.step_time, ended, num_replicas=2, prefill=prefill)
    cost = fleet.run(requests)
    return sorted(ended.requests, key=lambda request: request.traced.number), cost


def mean_s(ended: list[SimulatedRequest]) -> float:
    return sum((each.ended_at or 0.0) - each.traced.arrival_s for each in ended) / len(ended)


def test_long_prompts_are_computed_apart_where_that_pays() -> None:
    split, cost = with_roles(PrefillRole(1, bytes_per_s=1e9))
    assert cost.num_split > 0
    assert all(request.num_received == 60 and not request.error for request in split)
    whole, alone = with_roles(PrefillRole(1, bytes_per_s=1e9, splits=False))
    assert alone.num_split == 0
    assert mean_s(split) < mean_s(whole)
    assert with_roles(PrefillRole(1, bytes_per_s=1e9)) == (split, cost)


def test_each_role_scales_by_its_own_demand() -> None:
    arrived = {"prefill": 0, "decode": 0}

    def follow(role: str, num_replicas: int) -> Policy:
        def policy(snapshot: FleetSnapshot) -> int:
            arrived[role] += snapshot.arrived_tokens
            return num_replicas if snapshot.time_s > 1.0 else 1

        return policy

    requests = [TracedRequest(n, 0.2 * n, 400 if n % 4 == 3 else 20, 60) for n in range(60)]
    ended = Ended()
    fleet = SimulatedFleet(
        FAST_STEPS.config(), FAST_STEPS.step_time, ended, policy=follow("decode", 2), cold_start_s=2.0,
        prefill=PrefillRole(1, 1e9, policy=follow("prefill", 3)),
    )  # fmt: skip
    cost = fleet.run(requests)
    assert cost.most_replicas == 5
    assert cost.num_split > 0
    assert all(request.num_received == 60 and not request.error for request in ended.requests)
    assert 0 < arrived["prefill"] <= 400 * cost.num_split
    assert 0 < arrived["decode"] <= sum(each.num_prompt_tokens for each in requests) - arrived["prefill"]


def test_prompts_of_a_prefill_replica_that_drains_are_computed_elsewhere() -> None:
    def policy(snapshot: FleetSnapshot) -> int:
        return 2 if snapshot.time_s < 3.0 else 1

    split, cost = with_roles(PrefillRole(2, bytes_per_s=1e9, policy=policy))
    assert cost.num_split > 0
    assert cost.history[-2][1] < 4
    assert all(request.num_received == 60 and not request.error for request in split)
