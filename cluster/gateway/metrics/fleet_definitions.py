"""Metrics of a fleet, from the state that its controller publishes."""

from __future__ import annotations

from .definition import MODEL, gauge

TARGET = gauge("quire_fleet_target_replicas", "Replicas that the autoscaler wants.")
MIN = gauge("quire_fleet_min_replicas", "Lower bound of the target.")
MAX = gauge("quire_fleet_max_replicas", "Upper bound of the target.")
REPLICAS = gauge("quire_fleet_replicas", "Replicas of the fleet by state.", labels=(MODEL, "state"))
REASON = gauge(
    "quire_fleet_target_reason", "1 for the kind of reason of the present target.", labels=(MODEL, "reason")
)
STALE = gauge(
    "quire_fleet_state_stale",
    "1 while the fleet's controller does not answer, so that the figures of the fleet may be old.",
    labels=(),
)
NODES = gauge("quire_fleet_nodes", "Nodes of the cluster by state.", labels=("state",))
