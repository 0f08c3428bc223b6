"""Alert rules for Prometheus, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import fleet_definitions, replica_definitions, request_definitions
from .definition import MODEL
from .expressions import Scope

_SHORT, _LONG = Scope("5m"), Scope("10m")


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert rule.

    Attributes:
        lasts: how long the expression must hold, in Prometheus' notation.
        severity: ``page`` if somebody must act now, else ``ticket``.
        description: what it means and what to look at first.
    """

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        """Return the rule as in a Prometheus rule file."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.description},
        }


def alerts() -> list[Alert]:
    """Return all rules."""
    return [*_availability(), *_requests(), *_capacity()]


def _availability() -> list[Alert]:
    ready = _SHORT.total(replica_definitions.REPLICA_READY, MODEL)
    target = f"max by ({MODEL}) ({_SHORT.select(fleet_definitions.TARGET)})"
    running = _SHORT.per_replica(replica_definitions.REQUESTS_RUNNING)
    return [
        Alert(
            "QuireNoReadyReplica",
            f"({ready} == 0) unless on ({MODEL}) ({target} == 0)",
            "2m",
            "page",
            "No replica of {{ $labels.model_name }} takes requests",
            "Requests wait or fail. quire status says why each replica is not ready.",
        ),
        Alert(
            "QuireReplicaStalled",
            f"({running} > 0) and ({_SHORT.per_replica(replica_definitions.STEPS)} == 0)",
            "2m",
            "page",
            "Replica {{ $labels.engine }} has running requests and makes no steps",
            "A rank hangs, and the deadline of a step has not passed yet. quire top shows the stage of each rank.",
        ),
        Alert(
            "QuireReplicaSilent",
            f"{_SHORT.per_replica(replica_definitions.REPLICA_SILENCE)} > 15",
            "1m",
            "page",
            "Replica {{ $labels.engine }} has not answered for {{ $value | humanizeDuration }}",
            "Its scheduler or the network to it hangs; requests fail or move when its deadline passes.",
        ),
        Alert(
            "QuireFleetBelowTarget",
            f"{ready} < on ({MODEL}) {target}",
            "15m",
            "ticket",
            "{{ $labels.model_name }} has fewer ready replicas than the autoscaler wants",
            "Replicas do not start or do not stay: no node has room, or they fail. quire status names the reason.",
        ),
        Alert(
            "QuireReplicaLost",
            f"sum by ({MODEL}) (increase({_LONG.select(request_definitions.MOVES, cause='failure')}[10m])) > 0",
            "0m",
            "ticket",
            "A replica of {{ $labels.model_name }} failed under requests",
            "The requests continued at other replicas if there were any. The gateway's log names the rank.",
        ),
        Alert(
            "QuireFleetStateStale",
            f"max({_SHORT.select(fleet_definitions.STALE)}) > 0",
            "5m",
            "ticket",
            "The fleet's controller does not answer",
            "Requests are served on, but nothing is started, scaled or drained.",
        ),
    ]


def _requests() -> list[Alert]:
    failed = _SHORT.total(request_definitions.REQUEST_SUCCESS, MODEL, finished_reason="error")
    by_gateway = _SHORT.total(request_definitions.REFUSALS, reason="overloaded")
    by_scheduler = _SHORT.total(request_definitions.ERRORS, reason="overloaded")
    return [
        Alert(
            "QuireRequestsFail",
            f"{failed} / {_SHORT.total(request_definitions.REQUEST_SUCCESS, MODEL)} > 0.05",
            "5m",
            "page",
            "{{ $value | humanizePercentage }} of the completions of {{ $labels.model_name }} fail",
            f"{request_definitions.ERRORS.sample_name} names the kinds of error.",
        ),
        Alert(
            "QuireOverloaded",
            f"{by_gateway} > 0 or {by_scheduler} > 0",
            "10m",
            "page",
            "Requests are refused because queues are full",
            "Add replicas, or lower the limits of the tenants that send most.",
        ),
        Alert(
            "QuireSlowFirstToken",
            f"{_LONG.quantile(0.99, request_definitions.TIME_TO_FIRST_TOKEN)} > 10",
            "10m",
            "ticket",
            "1 % of the requests wait {{ $value | humanizeDuration }} for their first token",
            "Compare the time queued with the time in prefill: the one needs replicas, the other shorter prompts.",
        ),
        Alert(
            "QuireSlowTokens",
            f"{_LONG.quantile(0.99, request_definitions.INTER_TOKEN_LATENCY)} > 0.5",
            "10m",
            "ticket",
            "1 % of the tokens come {{ $value | humanizeDuration }} after the one before",
            "Long prompts share steps with decoding sequences: lower --max-num-batched-tokens.",
        ),
    ]


def _capacity() -> list[Alert]:
    usage = _SHORT.per_replica(replica_definitions.FULLEST_KV_USAGE)
    return [
        Alert(
            "QuireKvCacheFull",
            f"({usage} > 0.95) and ({_SHORT.per_replica(replica_definitions.PREEMPTIONS)} > 0)",
            "10m",
            "ticket",
            "Replica {{ $labels.engine }} preempts sequences for want of KV blocks",
            "Preempted sequences are computed again. Give it more KV memory, or lower --max-num-seqs.",
        ),
        Alert(
            "QuireQueueOld",
            f"{_SHORT.per_replica(replica_definitions.OLDEST_WAIT)} > 30",
            "5m",
            "ticket",
            "A request has waited {{ $value | humanizeDuration }} for replica {{ $labels.engine }}",
            "The replica is full, or the policy starves a tenant or a priority.",
        ),
        Alert(
            "QuireSchedulerSlow",
            f"{_LONG.mean_plan_wait()} > 0.005",
            "10m",
            "ticket",
            "The ranks of {{ $labels.engine }} wait {{ $value | humanizeDuration }} for each plan",
            "The scheduler's process lacks CPU time, or its machine is overloaded.",
        ),
    ]


def rule_file() -> dict[str, Any]:
    """Return the content of a Prometheus rule file."""
    return {"groups": [{"name": "quire", "rules": [alert.rule() for alert in alerts()]}]}
