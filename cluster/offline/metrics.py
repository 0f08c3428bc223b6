"""Metrics of an LLM, as vLLM's `LLM.get_metrics` returns them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...proto.replica_status import ReplicaStatus


@dataclass(frozen=True, slots=True)
class Metric:
    """A value under vLLM's name.

    Attributes:
        labels: the name of the model.
    """

    name: str
    labels: dict[str, str] = field(kw_only=True, default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number as it is now."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Numbers that only grow: of each position of a draft, how often its token was accepted."""

    values: list[int]


def metrics_of(status: ReplicaStatus) -> list[Metric]:
    """Return the metrics of an engine's state."""
    labels = {"model_name": status.model}
    accepted = list(status.num_accepted_tokens)
    gauges = {
        "vllm:num_requests_running": status.num_running,
        "vllm:num_requests_waiting": status.num_waiting,
        "vllm:kv_cache_usage_perc": status.kv_use,
    }
    counters = {
        "vllm:num_preemptions": status.num_preemptions,
        "vllm:prefix_cache_queries": status.prefix_query_tokens,
        "vllm:prefix_cache_hits": status.prefix_hit_tokens,
        "vllm:spec_decode_num_drafts": status.num_drafts,
        "vllm:spec_decode_num_draft_tokens": status.num_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens": sum(accepted),
        "quire_computed_tokens": status.num_computed_tokens,
        "quire_finished_sequences": status.num_finished,
        "quire_steps": status.num_steps,
    }
    return [
        *(Gauge(name, value, labels=labels) for name, value in gauges.items()),
        *(Counter(name, value, labels=labels) for name, value in counters.items()),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", accepted, labels=labels),
    ]
