"""Goodput of a replica under overload, in simulated time."""

from __future__ import annotations

import pytest

from benchmarks.overload_model import Load, Outcome, Phase, serve
from benchmarks.replay import ReplicaModel, roofline

# A replica on which a step takes 20 ms: about 12 requests/s.
SLOW = roofline(
    flops_per_token=1e9, flops_per_s=2e13, weight_bytes=2e9, kv_bytes_per_token=1e4, bytes_per_s=1e11
)
SUSTAINABLE = 11.0


def model(policy: str = "fcfs") -> ReplicaModel:
    return ReplicaModel(SLOW, max_num_seqs=16, max_num_batched_tokens=512, policy=policy)


def load(*phases: Phase, **settings: object) -> Load:
    sizes: dict[str, object] = {"mean_prompt_tokens": 60.0, "mean_output_tokens": 50.0}
    return Load(phases, **(sizes | settings))  # type: ignore[arg-type]


def goodput(rate: float, **settings: object) -> float:
    return serve(load(Phase(16, rate), **settings), model()).goodput(4, 16)


@pytest.mark.parametrize("timeout_s", [3.0, None])
@pytest.mark.parametrize("max_tokens_factor", [1.0, 4.0])
def test_goodput_at_ten_times_the_load_is_near_its_peak(
    timeout_s: float | None, max_tokens_factor: float
) -> None:
    settings = {"timeout_s": timeout_s, "max_tokens_factor": max_tokens_factor}
    peak = max(goodput(SUSTAINABLE * factor, **settings) for factor in (1.0, 1.3))
    assert goodput(10 * SUSTAINABLE, **settings) >= 0.9 * peak


def test_refusals_come_at_once() -> None:
    outcome = serve(load(Phase(12, 10 * SUSTAINABLE), timeout_s=3.0), model())
    refused = [call for call in outcome.between(3, 9) if call.error == "RESOURCE_EXHAUSTED"]
    delays = sorted((call.ended_at or 0.0) - call.arrived_at for call in refused)
    assert len(refused) > 300
    assert delays[len(delays) // 2] < 0.05
    assert delays[int(0.9 * len(delays))] < 0.5


@pytest.mark.parametrize("retries", [False, True])
def test_replica_serves_all_again_after_overload(retries: bool) -> None:
    phases = Phase(4, 0.7 * SUSTAINABLE), Phase(8, 10 * SUSTAINABLE), Phase(12, 0.7 * SUSTAINABLE)
    outcome = serve(load(*phases, timeout_s=3.0, retries=retries), model())
    assert _share_good(outcome, 16, 21) > 0.9


def test_call_that_is_served_after_a_refusal_has_no_error() -> None:
    outcome = serve(load(Phase(8, 3 * SUSTAINABLE), timeout_s=3.0, retries=True), model())
    served = [call for call in outcome.calls if call.is_good]
    assert served
    assert not any(call.error for call in served)


def test_tenant_within_its_share_is_served_under_the_overload_of_another() -> None:
    tenants = (("greedy", 110.0), ("light", 3.0))
    outcome = serve(load(Phase(20, 113.0), timeout_s=3.0, tenants=tenants), model("fair"))
    assert _share_good(outcome, 4, 17, "light") > 0.85
    assert _share_good(outcome, 4, 17, "greedy") < 0.2


def _share_good(outcome: Outcome, start: float, end: float, tenant: str = "") -> float:
    calls = [call for call in outcome.between(start, end) if call.tenant == tenant]
    return sum(call.is_good for call in calls) / len(calls)
