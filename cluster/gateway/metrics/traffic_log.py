"""TrafficLog: one line per busy model and interval in the log."""

from __future__ import annotations

import logging

from ....proto.replica_status import ReplicaStatus
from .recent_traffic import Latency, RecentTraffic, Traffic
from .views import ModelsView, ModelView

INTERVAL_S = 10

_log = logging.getLogger(__name__)


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


def describe(traffic: Traffic, statuses: list[ReplicaStatus]) -> str:
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
        if latency.p50 is not None:
            parts.append(f"{name} {_milliseconds(latency)}")
    if traffic.errors_per_s:
        parts.append(f"{traffic.errors_per_s * traffic.seconds:.0f} errors")
    return ", ".join(parts)


def _statuses(model: ModelView) -> list[ReplicaStatus]:
    latest = (client.latest_status for client in model.pool.clients.values())
    return [status for status in latest if status is not None]


def _milliseconds(latency: Latency) -> str:
    assert latency.p50 is not None
    assert latency.p99 is not None
    return f"p50 {1e3 * latency.p50:.0f} ms p99 {1e3 * latency.p99:.0f} ms"
