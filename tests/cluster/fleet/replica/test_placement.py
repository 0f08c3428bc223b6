"""Placement: bundles, strategy, and the explanation of a shortage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import small_config

from quire.cluster.fleet.ray import compat
from quire.cluster.fleet.ray.compat import AutoscalerStatus
from quire.cluster.fleet.replica import placement
from quire.cluster.fleet.replica.placement import (
    PACK,
    STRICT_PACK,
    ClusterView,
    Node,
    NodeType,
    bundles_for,
    choose_strategy,
    explain_shortage,
    read_node_types,
)
from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError

HEAD = Node("aaa", "10.0.0.1", {"CPU": 4.0}, {"CPU": 3.0})
BIG = Node("bbb", "10.0.0.2", {"CPU": 16.0, "GPU": 8.0}, {"CPU": 12.0, "GPU": 2.0})
SMALL_TYPE = NodeType("gpu-small", {"CPU": 8.0, "GPU": 1.0}, 4)
BIG_TYPE = NodeType("gpu-big", {"CPU": 32.0, "GPU": 8.0}, 2)


def config(size: int, device: str = "cuda") -> EngineConfig:
    config = small_config()
    return replace(config, parallel=replace(config.parallel, tensor_parallel_size=size, device=device))


def test_bundles_are_the_scheduler_s_and_one_per_rank() -> None:
    assert bundles_for(config(2)) == [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert bundles_for(config(1, "cpu")) == [{"CPU": 1.0}, {"CPU": 1.0}]
    assert bundles_for(config(1, "cpu"), {"GPU": 1, "slot": 0.5})[1] == {"CPU": 1.0, "GPU": 1, "slot": 0.5}


@pytest.mark.parametrize(
    ("size", "nodes", "types", "strategy"),
    [
        (4, [BIG], [], STRICT_PACK),  # busy now, but large enough
        (4, [HEAD], [SMALL_TYPE], PACK),
        (4, [HEAD], [SMALL_TYPE, BIG_TYPE], STRICT_PACK),
        (8, [BIG], [], STRICT_PACK),
        (16, [BIG], [BIG_TYPE], PACK),
        (1, [HEAD], [SMALL_TYPE], STRICT_PACK),
        (4, [HEAD], [NodeType("none", {"CPU": 99.0, "GPU": 99.0}, 0)], PACK),
        (1, [], [], PACK),
    ],
)
def test_strategy_is_one_node_if_one_can_hold_the_replica(
    size: int, nodes: list[Node], types: list[NodeType], strategy: str
) -> None:
    assert choose_strategy(bundles_for(config(size)), nodes, types) == strategy


def test_shortage_names_needed_and_available_resources() -> None:
    view = ClusterView((HEAD, BIG), (SMALL_TYPE,), ("1 of gpu-small being started",))
    assert explain_shortage(bundles_for(config(4)), STRICT_PACK, view) == (
        "replica needs 5 CPU, 4 GPU on one node; "
        "nodes: 10.0.0.1 has 3 of 4 CPU free, 0 of 0 GPU free, 10.0.0.2 has 12 of 16 CPU free, 2 of 8 GPU free; "
        "node types: gpu-small offers 8 CPU, 1 GPU (max 4 nodes); "
        "1 of gpu-small being started"
    )


def test_shortage_names_what_the_fully_grown_cluster_lacks() -> None:
    explanation = explain_shortage(bundles_for(config(16)), PACK, ClusterView((HEAD,), (SMALL_TYPE,)))
    assert "replica needs 17 CPU, 16 GPU over several nodes, each rank 1 CPU, 1 GPU; nodes:" in explanation
    assert explanation.endswith("the whole cluster, fully grown, has 4 GPU")
    explanation = explain_shortage(bundles_for(config(1)), PACK, ClusterView((HEAD,)))
    assert "no autoscaler is known" in explanation
    assert explanation.endswith("the whole cluster, fully grown, has 0 GPU")


def test_shortage_names_a_rank_larger_than_any_node() -> None:
    explanation = explain_shortage(
        bundles_for(config(1), {"GPU": 2.0}), PACK, ClusterView((HEAD,), (SMALL_TYPE,))
    )
    assert explanation.endswith("no node or node type holds one rank: 1 CPU, 2 GPU")


def test_node_types_are_read_from_a_file_for_ray_up(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        """
max_workers: 6
head_node_type: head
available_node_types:
  head: {resources: {CPU: 4}, node_config: {}}
  small: {resources: {CPU: 8, GPU: 1}, max_workers: 4, node_config: {}}
  big: {resources: {CPU: 32, GPU: 8}, node_config: {}}
"""
    )
    small, big = NodeType("small", {"CPU": 8, "GPU": 1}, 4), NodeType("big", {"CPU": 32, "GPU": 8}, 6)
    assert read_node_types(path) == (small, big)


@pytest.mark.parametrize(
    "text", [None, "", "[1]", "available_node_types: {a: 3}", "a: [", "available_node_types: 1"]
)
def test_file_that_is_not_for_ray_up_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"cluster.yaml is not a cluster file of Ray's autoscaler"):
        read_node_types(path)


def test_launches_of_the_autoscaler_are_a_line_per_node_type(monkeypatch: pytest.MonkeyPatch) -> None:
    status = AutoscalerStatus({"gpu-small": 3}, [("gpu-big", "no quota")])
    monkeypatch.setattr(compat, "autoscaler_status", lambda: status)
    assert placement._read_launches() == [
        "3 of gpu-small being started",
        "gpu-big could not be started: no quota",
    ]


def test_unreadable_autoscaler_status_is_a_line_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "kv_get", lambda key: b"{not JSON")
    (line,) = placement._read_launches()
    assert line.startswith("the autoscaler's status cannot be read: JSONDecodeError")
