"""RecentTraffic: rates and latencies of the last minute, from samples of the totals, also as lines of the log."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ....proto.replica_status import ReplicaStatus
from ...client.wire.status import LatencyInfo, TrafficInfo
from . import request_definitions
from .request_metrics import ERROR, ModelRequests, RequestMetrics
from .values import quantile
from .views import ModelsView, ModelView

SAMPLE_S = 1.0
NUM_SAMPLES = 61  # a minute
# Between the lines of the log.
INTERVAL_S = 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Totals:
    """A model's totals at one time."""

    time_s: float
    num_prompt_tokens: int
    num_generated_tokens: int
    num_finished: int
    num_errors: int
    first_token: tuple[int, ...]
    inter_token: tuple[int, ...]

    @staticmethod
    def of(model: ModelRequests, time_s: float) -> _Totals:
        return _Totals(
            time_s,
            model.num_prompt_tokens,
            model.num_generated_tokens,
            model.finished.total(),
            model.finished[ERROR],
            tuple(model.histograms[request_definitions.TIME_TO_FIRST_TOKEN].counts),
            tuple(model.histograms[request_definitions.INTER_TOKEN_LATENCY].counts),
        )


class RecentTraffic:
    """Keeps the totals of the last minute, sampled by `sample` once per SAMPLE_S.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, requests: RequestMetrics, clock: Callable[[], float]) -> None:
        self._requests = requests
        self._clock = clock
        self._samples: defaultdict[str, deque[_Totals]] = defaultdict(lambda: deque(maxlen=NUM_SAMPLES))

    def sample(self) -> None:
        """Store the present totals of every model."""
        now = self._clock()
        for name, model in self._requests.models.items():
            self._samples[name].append(_Totals.of(model, now))

    def of(self, model: str, num_samples: int = NUM_SAMPLES - 1) -> TrafficInfo:
        """Return the traffic of a model over its last `num_samples` intervals."""
        num_open = self._requests.models[model].num_open
        samples = self._samples[model]
        if len(samples) < 2:
            return TrafficInfo(model, num_open=num_open)
        first, last = samples[max(0, len(samples) - 1 - num_samples)], samples[-1]
        seconds = last.time_s - first.time_s
        return TrafficInfo(
            model,
            seconds=seconds,
            num_open=num_open,
            prompt_tokens_per_s=(last.num_prompt_tokens - first.num_prompt_tokens) / seconds,
            generated_tokens_per_s=(last.num_generated_tokens - first.num_generated_tokens) / seconds,
            completions_per_s=(last.num_finished - first.num_finished) / seconds,
            errors_per_s=(last.num_errors - first.num_errors) / seconds,
            first_token=_latency(
                request_definitions.TIME_TO_FIRST_TOKEN.buckets, first.first_token, last.first_token
            ),
            inter_token=_latency(
                request_definitions.INTER_TOKEN_LATENCY.buckets, first.inter_token, last.inter_token
            ),
        )

    def generated_tokens_per_s(self, model: str) -> list[float]:
        """Return the rate in each interval of the last minute, the oldest first."""
        return [
            (later.num_generated_tokens - earlier.num_generated_tokens) / (later.time_s - earlier.time_s)
            for earlier, later in pairwise(self._samples[model])
        ]


def _latency(bounds: Sequence[float], first: tuple[int, ...], last: tuple[int, ...]) -> LatencyInfo:
    counts = [after - before for before, after in zip(first, last, strict=True)]
    return LatencyInfo(quantile(0.5, bounds, counts), quantile(0.99, bounds, counts))


class TrafficLog:
    """Writes the traffic of the last INTERVAL_S; nothing for a model without requests."""

    def __init__(self, models: ModelsView, recent: RecentTraffic) -> None:
        self._models = models
        self._recent = recent

    def write(self) -> None:
        for model in self._models:
            traffic = self._recent.of(model.name, INTERVAL_S)
            if traffic.num_open or traffic.completions_per_s:
                _log.info("%s: %s", model.name, describe(traffic, _statuses(model)))


def describe(traffic: TrafficInfo, statuses: list[ReplicaStatus]) -> str:
    """Return the line: throughput, latencies of callers, and the load of the replicas.

    Args:
        statuses: the latest of each replica.
    """
    parts = [
        f"{traffic.generated_tokens_per_s:,.0f} generated and {traffic.prompt_tokens_per_s:,.0f} prompt tokens/s",
        f"{sum(each.num_running for each in statuses)} running, {sum(each.num_waiting for each in statuses)} waiting",
    ]
    if num_blocks := sum(each.num_blocks for each in statuses):
        parts.append(f"KV {sum(each.num_used_blocks for each in statuses) / num_blocks:.0%}")
    if queries := sum(each.prefix_query_tokens for each in statuses):
        parts.append(f"prefix hits {sum(each.prefix_hit_tokens for each in statuses) / queries:.0%}")
    for name, latency in (("first token", traffic.first_token), ("between tokens", traffic.inter_token)):
        if latency.p50_s is not None:
            parts.append(f"{name} {_milliseconds(latency)}")
    if traffic.errors_per_s:
        parts.append(f"{traffic.errors_per_s * traffic.seconds:.0f} errors")
    return ", ".join(parts)


def _statuses(model: ModelView) -> list[ReplicaStatus]:
    latest = (client.latest_status for client in model.pool.clients.values())
    return [status for status in latest if status is not None]


def _milliseconds(latency: LatencyInfo) -> str:
    assert latency.p50_s is not None
    assert latency.p99_s is not None
    return f"p50 {1e3 * latency.p50_s:.0f} ms p99 {1e3 * latency.p99_s:.0f} ms"
