"""A run of the simulator: what to serve a trace on, and the figures of how it went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.deployment import ScalingLimits
from .distribution import Distribution
from .engine import SimulatedEngine
from .fleet import FleetCost, PrefillRole, SimulatedFleet, SimulatedRequest, Watcher, autoscaling
from .traces import TracedRequest


@dataclass(frozen=True, slots=True)
class Targets:
    """Latencies that a request must keep to count as good; None for any.

    Attributes:
        itl_s: bound of the mean time between a request's tokens.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def hold(self, ttft_s: float, itl_s: float, e2e_s: float) -> bool:
        """Return whether a request with these latencies is good."""
        pairs = (ttft_s, self.ttft_s), (itl_s, self.itl_s), (e2e_s, self.e2e_s)
        return all(bound is None or value <= bound for value, bound in pairs)


@dataclass(slots=True)
class Summary(Watcher):
    """Latencies and counts of a run, in memory that does not grow with it.

    Attributes:
        ttft, itl, e2e: times to the first token, between tokens and to the end, from the arrival.
        wait: from the arrival until the prompt's computation begins.
        errors: kind |-> number of requests.
    """

    targets: Targets = field(default_factory=Targets)
    ttft: Distribution = field(default_factory=Distribution)
    itl: Distribution = field(default_factory=Distribution)
    e2e: Distribution = field(default_factory=Distribution)
    wait: Distribution = field(default_factory=Distribution)
    errors: Counter[str] = field(default_factory=Counter)
    num_ended: int = 0
    num_good: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    on_progress: Callable[[int], None] = lambda num_ended: None

    def on_first_token(self, request: SimulatedRequest, now: float) -> None:
        self.ttft.add(now - request.traced.arrival_s)

    def on_gap(self, seconds: float, count: int = 1) -> None:
        self.itl.add(seconds, count)

    def on_gaps(self, gaps: Sequence[float], count: int) -> None:
        self.itl.add_all(gaps, count)

    def on_end(self, request: SimulatedRequest) -> None:
        self.num_ended += 1
        self.on_progress(self.num_ended)
        if request.error:
            self.errors[request.error] += 1
            return
        first_s, ended_at, arrived_at = request.first_token_s, request.ended_at, request.traced.arrival_s
        assert first_s is not None, "a request ended without a token"
        assert ended_at is not None, "a request that runs is reported as ended"
        self.e2e.add(ended_at - arrived_at)
        self.wait.add(request.wait_s)
        self.num_prompt_tokens += request.traced.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.num_output_tokens += request.num_received
        itl_s = (ended_at - first_s) / max(1, request.num_received - 1)
        self.num_good += self.targets.hold(first_s - arrived_at, itl_s, ended_at - arrived_at)

    @property
    def num_failed(self) -> int:
        return self.errors.total()


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated run and its figures."""

    engine: SimulatedEngine
    limits: ScalingLimits
    summary: Summary
    cost: FleetCost
    prefill: PrefillRole | None = None

    @property
    def gpu_hours(self) -> float:
        return self.cost.replica_seconds * self.engine.num_gpus / 3600

    def figures(self) -> dict[str, Any]:
        """Return the run as JSON has it."""
        summary, cost, config = self.summary, self.cost, self.engine.config
        seconds = max(cost.end_s, 1e-9)
        return {
            "model": config.model.name,
            "gpu": self.engine.step_time.device.name,
            "step_time": self.engine.step_time.source,
            "tensor_parallel_size": config.parallel.tensor_parallel_size,
            "min_replicas": self.limits.min_replicas,
            "max_replicas": self.limits.max_replicas,
            "prefill_replicas": 0 if self.prefill is None else self.prefill.num_replicas,
            "split_requests": cost.num_split,
            "kv_tokens": self.engine.num_kv_tokens,
            "seconds": cost.end_s,
            "requests": summary.num_ended,
            "errors": dict(summary.errors),
            "requests_per_s": summary.num_ended / seconds,
            "output_tokens_per_s": summary.num_output_tokens / seconds,
            "prompt_tokens_per_s": summary.num_prompt_tokens / seconds,
            "goodput_requests_per_s": summary.num_good / seconds,
            "hit_rate": summary.num_cached_tokens / max(1, summary.num_prompt_tokens),
            "ttft_s": summary.ttft.summary(),
            "itl_s": summary.itl.summary(),
            "e2e_s": summary.e2e.summary(),
            "wait_s": summary.wait.summary(),
            "gpu_hours": self.gpu_hours,
            "most_replicas": cost.most_replicas,
            "steps": cost.num_steps,
            "preemptions": cost.num_preemptions,
        }


def run_trace(
    engine: SimulatedEngine,
    trace: Iterable[TracedRequest],
    limits: ScalingLimits,
    *,
    summary: Summary | None = None,
    shares_prefixes: bool = True,
    drain_grace_s: float = 30.0,
    prefill: PrefillRole | None = None,
    max_prefill_replicas: int | None = None,
) -> Run:
    """Serve a trace on a fleet within the limits, beginning with the fewest replicas.

    Args:
        summary: collects the figures; a new one by default.
        shares_prefixes: requests of the trace have prefixes in common; without, no prefix cache is simulated, unless
            blocks travel, which are named as those of the prefix cache.
        prefill: replicas that compute prompts for the others, which then have the decode role.
        max_prefill_replicas: of these, which scale by their own demand; None if their number stays.
    """
    if not shares_prefixes and prefill is None:
        cache = replace(engine.config.cache, prefix_caching=False)
        engine = replace(engine, config=replace(engine.config, cache=cache))
    if prefill is not None and max_prefill_replicas not in (None, prefill.num_replicas):
        bounds = replace(limits, min_replicas=prefill.num_replicas, max_replicas=max_prefill_replicas)
        prefill = replace(prefill, policy=autoscaling(bounds))
    summary = Summary() if summary is None else summary
    is_fixed = limits.min_replicas == limits.max_replicas
    fleet = SimulatedFleet(
        engine.config,
        engine.step_time,
        summary,
        num_replicas=limits.min_replicas,
        policy=None if is_fixed else autoscaling(limits),
        cold_start_s=limits.cold_start_s,
        drain_grace_s=drain_grace_s,
        prefill=prefill,
    )
    return Run(engine, limits, summary, fleet.run(trace), prefill)
