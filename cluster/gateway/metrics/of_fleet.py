"""Metrics of a fleet, from the state that its controller publishes."""

from __future__ import annotations

from .definition import MODEL, Kind, Metric

TARGET = Metric(
    name="quire_fleet_target_replicas", kind=Kind.GAUGE, help="Replicas that the autoscaler wants."
)
MIN = Metric(name="quire_fleet_min_replicas", kind=Kind.GAUGE, help="Lower bound of the target.")
MAX = Metric(name="quire_fleet_max_replicas", kind=Kind.GAUGE, help="Upper bound of the target.")
REPLICAS = Metric(
    name="quire_fleet_replicas",
    kind=Kind.GAUGE,
    help="Replicas of the fleet by state.",
    labels=(MODEL, "state"),
)
REASON = Metric(
    name="quire_fleet_target_reason",
    kind=Kind.GAUGE,
    help="1 for the kind of reason of the present target.",
    labels=(MODEL, "reason"),
)
STALE = Metric(
    name="quire_fleet_state_stale",
    kind=Kind.GAUGE,
    help="1 while the fleet's controller does not answer, so that the figures of the fleet may be old.",
    labels=(),
)
NODES = Metric(
    name="quire_fleet_nodes", kind=Kind.GAUGE, help="Nodes of the cluster by state.", labels=("state",)
)
