"""Replicas on spot machines, and on others while the cloud has none: Ray's nodes with labels."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util.placement_group import remove_placement_group
from ray_nodes import RayNodes

from quire.cluster.fleet.ray.local_cluster import attach
from quire.cluster.fleet.replica import placement
from quire.cluster.fleet.replica.launch_progress import LaunchStage
from quire.proto.model.parallel_split import ParallelSplit

SPOT, ON_DEMAND = {"quire.io/spot": "true"}, {"quire.io/spot": "false"}

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_replica_is_placed_on_demand_where_no_spot_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PREFERENCE_TIMEOUT_S", 1.0)
    stages: list[LaunchStage] = []
    target: Any = SimpleNamespace(
        namespace="test", is_detached=False, placement_timeout_s=120.0, autoscaling_config=None,
        node_selectors=(SPOT, ON_DEMAND),
    )  # fmt: skip
    with RayNodes({"CPU": 2.0}, labels=ON_DEMAND) as nodes, ExitStack() as stack:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            monkeypatch.setenv(name, nodes.environment[name])
        stack.enter_context(attach(nodes.address))
        made = placement.Reservation(
            "replica-spot", [{"CPU": 1.0}] * 2, ParallelSplit(), target, lambda stage, _: stages.append(stage)
        )
        placed = made.reserve()
        (node,) = ray.nodes()
        remove_placement_group(made.group)
    assert placed == (node["NodeID"],) * 2
    assert stages.count(LaunchStage.PLACING) == 2
