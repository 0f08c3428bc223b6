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
    arrange,
    bundles_for,
    choose_strategy,
    describe_places,
    explain_shortage,
    nearest_split,
    read_node_types,
)
from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError
from quire.proto.model.parallel_split import ParallelSplit

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


BIG_NODES = [Node(f"node{number}", f"10.0.1.{number}", BIG.total, BIG.total) for number in range(64)]
WIDE = {"CPU": 16.0, "GPU": 8.0}


def replica(pp: int, tp: int) -> tuple[EngineConfig, ParallelSplit]:
    found = config(tp)
    parallel = replace(found.parallel, pipeline_parallel_size=pp, stage_sizes=(10,) * pp)
    return replace(found, parallel=parallel), ParallelSplit.of(parallel)


@pytest.mark.parametrize(
    ("pp", "tp", "nodes", "types", "num_bundles", "strategy"),
    [
        (2, 4, BIG_NODES, [], 9, STRICT_PACK),  # eight GPUs of one node hold both stages
        (2, 8, BIG_NODES, [], 3, PACK),
        (4, 8, BIG_NODES, [], 5, PACK),
        (2, 8, [HEAD], [NodeType("big", WIDE, 2)], 3, PACK),  # nodes that can be added
        (2, 16, BIG_NODES, [], 33, PACK),  # no node holds a stage
        (4, 1, [HEAD], [SMALL_TYPE], 5, PACK),  # a stage is a rank
        (1, 16, BIG_NODES, [], 17, PACK),
    ],
)
def test_stages_are_placed_whole_if_a_node_can_hold_one(
    pp: int, tp: int, nodes: list[Node], types: list[NodeType], num_bundles: int, strategy: str
) -> None:
    engine, split = replica(pp, tp)
    arrangement = arrange(bundles_for(engine), split, nodes, types)
    assert (len(arrangement.bundles), arrangement.strategy) == (num_bundles, strategy)
    assert len(arrangement.bundle_of) == 1 + pp * tp
    if num_bundles == 1 + pp and tp > 1:
        assert arrangement.bundles[1] == {"CPU": tp, "GPU": tp}
        stages = [arrangement.bundle_of[1 + rank] for rank in range(pp * tp)]
        assert stages == [1 + rank // tp for rank in range(pp * tp)]
    total = {name: sum(bundle.get(name, 0) for bundle in arrangement.bundles) for name in ("CPU", "GPU")}
    assert total == {"CPU": 1 + pp * tp, "GPU": pp * tp}


@pytest.mark.parametrize(
    ("tp", "groups", "num_bundles"),
    [
        (16, 2, 3),
        (16, 16, 17),  # a group is a rank
        (32, 2, 33),  # no node holds a group
        (8, 2, 9),  # one node holds all
    ],
)
def test_ranks_that_attend_together_are_placed_whole_if_a_node_can_hold_them(
    tp: int, groups: int, num_bundles: int
) -> None:
    engine, _ = replica(1, tp)
    split = ParallelSplit(1, tp, groups, tp)
    arrangement = arrange(bundles_for(engine), split, BIG_NODES, [])
    assert len(arrangement.bundles) == num_bundles
    if num_bundles == 1 + groups:
        assert arrangement.bundle_of == (0, *(1 + rank // (tp // groups) for rank in range(tp)))
        where = describe_places(split, [f"node{rank // 8}" for rank in range(tp)])
        assert (
            where == "all 16 ranks on node0 and node1, which exchange tokens over the network in every layer"
        )


def test_log_says_which_stage_is_where() -> None:
    _, split = replica(2, 2)
    assert describe_places(split, ["a"] * 4) == ""
    assert describe_places(split, ["a", "a", "b", "b"]) == (
        "stage 0 of 2, layers 0 to 9 on a; stage 1 of 2, layers 10 to 19 on b"
    )
    assert "on a and b, whose ranks sum over the network" in describe_places(split, ["a", "b", "b", "b"])
    _, tensor = replica(1, 2)
    assert describe_places(tensor, ["a", "b"]).startswith("all 2 ranks on a and b, whose ranks sum")


def test_shortage_names_a_stage_larger_than_any_node() -> None:
    engine, split = replica(2, 8)
    bundles = arrange(bundles_for(engine), split, BIG_NODES, []).bundles
    explanation = explain_shortage(bundles, PACK, ClusterView((HEAD, BIG)), "pipeline stage")
    assert "over several nodes, each pipeline stage 8 CPU, 8 GPU" in explanation


@pytest.mark.parametrize(
    ("pp", "tp", "nodes", "types", "nearest"),
    [
        (2, 8, BIG_NODES[:2], [], ""),
        (1, 16, BIG_NODES[:2], [], ""),  # over the network, but placed
        (4, 8, BIG_NODES[:2], [], "pipeline_parallel_size 2 with tensor_parallel_size 8 would be placed"),
        (2, 8, BIG_NODES[:1], [], "pipeline_parallel_size 1 with tensor_parallel_size 8 would be placed"),
        (1, 8, [HEAD], [SMALL_TYPE], "pipeline_parallel_size 4 with tensor_parallel_size 1 would be placed"),
        (2, 1, [HEAD], [], ""),  # without GPUs there is no split
        (70, 8, BIG_NODES, [], "pipeline_parallel_size 64 with tensor_parallel_size 8 would be placed"),
    ],
)
def test_shortage_names_the_nearest_split_that_would_be_placed(
    pp: int, tp: int, nodes: list[Node], types: list[NodeType], nearest: str
) -> None:
    engine, split = replica(pp, tp)
    found = nearest_split(bundles_for(engine), split, ClusterView(tuple(nodes), tuple(types)))
    assert found.startswith(nearest) if nearest else not found


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
