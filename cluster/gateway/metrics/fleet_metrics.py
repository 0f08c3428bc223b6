"""Samples of a fleet: targets of the autoscaler, replicas and nodes by state."""

from __future__ import annotations

from collections import Counter

from ....proto import admin_pb2
from ...client.wire.message_fields import from_message
from ...client.wire.status import FleetInfo
from . import of_fleet
from .samples import Samples

# Beginning of a reason of the autoscaler, without its numbers |-> label.
REASONS = {
    "no request for": "idle",
    "idle for less than": "keep_alive",
    "prompt tokens arrive": "arrivals",
    "prompt tokens wait": "backlog",
    "KV memory of": "kv_memory",
    "rows of": "rows",
    "a request has waited": "wait",
    "held for": "held",
    "min_replicas is": "min_replicas",
    "max_replicas is": "max_replicas",
}
OTHER = "other"


def collect_fleet(samples: Samples, state: admin_pb2.GetStatusResponse) -> None:
    """Add the samples of a fleet's state."""
    fleet = from_message(FleetInfo, state)
    samples.add(of_fleet.STALE, (), bool(fleet.problem))
    for deployment in fleet.deployments:
        labels = (deployment.model,)
        samples.add(of_fleet.TARGET, labels, deployment.target_replicas)
        samples.add(of_fleet.MIN, labels, deployment.min_replicas)
        samples.add(of_fleet.MAX, labels, deployment.max_replicas)
        samples.add(of_fleet.REASON, (*labels, reason_label(deployment.reason)), 1)
    states = Counter((replica.model, replica.state or "unknown") for replica in fleet.replicas)
    for labels_of_state, count in states.items():
        samples.add(of_fleet.REPLICAS, labels_of_state, count)
    draining = sum(node.draining for node in fleet.nodes)
    samples.add_counts(of_fleet.NODES, (), {"draining": draining, "ready": len(fleet.nodes) - draining})


def reason_label(reason: str) -> str:
    """Return the label of an autoscaler's reason: a fixed word, since the text has numbers in it."""
    words = reason.lstrip("0123456789. ")
    return next((label for beginning, label in REASONS.items() if words.startswith(beginning)), OTHER)
