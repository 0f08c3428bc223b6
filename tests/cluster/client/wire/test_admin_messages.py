"""Status messages of the server as frozen dataclasses of the client."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from quire import (
    DeploymentInfo,
    FleetInfo,
    KvCacheInfo,
    ModelInfo,
    NodeInfo,
    QueueInfo,
    RankStatus,
    ReplicaInfo,
)
from quire.cluster.client.wire.admin_messages import block_map_to_message
from quire.cluster.client.wire.message_fields import from_message
from quire.cluster.client.wire.status import BlockMapInfo, LatencyInfo, TrafficInfo
from quire.proto import admin_pb2, inference_pb2
from quire.proto.block_map import BlockMap, MappedSequence


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ModelInfo, inference_pb2.Model),
        (FleetInfo, admin_pb2.GetStatusResponse),
        (ReplicaInfo, admin_pb2.Replica),
        (RankStatus, admin_pb2.Rank),
        (KvCacheInfo, admin_pb2.KvUse),
        (QueueInfo, admin_pb2.Queue),
        (DeploymentInfo, admin_pb2.DeploymentStatus),
        (NodeInfo, admin_pb2.Node),
        (TrafficInfo, admin_pb2.ModelTraffic),
        (LatencyInfo, admin_pb2.LatencyQuantiles),
        (BlockMapInfo, admin_pb2.GetBlockMapResponse),
        (MappedSequence, admin_pb2.MappedSequence),
    ],
)
def test_dataclass_has_the_fields_of_the_message(kind: type, message: Any) -> None:
    assert {field.name for field in fields(kind)} == set(message.DESCRIPTOR.fields_by_name)


def test_fleet_is_converted_whole() -> None:
    message = admin_pb2.GetStatusResponse(
        replicas=[
            admin_pb2.Replica(
                replica_id="replica-1",
                model="tiny",
                ready=True,
                ranks=[admin_pb2.Rank(rank=1, pid=7, node="n", device="cpu", stage="idle")],
                kv=admin_pb2.KvUse(num_blocks=9, prefix_query_tokens=8, prefix_hit_tokens=2),
                queue=admin_pb2.Queue(num_running=3),
                num_steps=5,
                state=admin_pb2.REPLICA_STATE_READY,
                version="v1",
                node_ids=["a", "b"],
            ),
            admin_pb2.Replica(replica_id="replica-2", model="tiny", problem="it did not answer"),
        ],
        deployments=[admin_pb2.DeploymentStatus(model="tiny", version="v1", max_replicas=4, reason="load")],
        nodes=[admin_pb2.Node(node_id="a", address="10.0.0.1", draining=True, resources={"CPU": 4.0})],
        problem="stale",
    )
    fleet = from_message(FleetInfo, message)
    first, second = fleet.replicas
    assert first == ReplicaInfo(
        "replica-1",
        "tiny",
        ready=True,
        state="ready",
        version="v1",
        ranks=(RankStatus(1, 7, "n", "cpu", "idle"),),
        node_ids=("a", "b"),
        kv=KvCacheInfo(num_blocks=9, prefix_query_tokens=8, prefix_hit_tokens=2),
        queue=QueueInfo(num_running=3),
        num_steps=5,
    )
    assert (first.kv.prefix_hit_rate, second.kv.prefix_hit_rate) == (0.25, 0.0)
    assert second == ReplicaInfo("replica-2", "tiny", problem="it did not answer")
    assert fleet.deployments == (DeploymentInfo("tiny", "v1", 0, 4, 0, "load"),)
    assert fleet.nodes == (NodeInfo("a", "10.0.0.1", True, {"CPU": 4.0}),)
    assert fleet.problem == "stale"


def test_model_is_converted() -> None:
    message = inference_pb2.Model(name="tiny", architecture="Llama", max_model_len=64, vocab_size=100)
    assert from_message(ModelInfo, message) == ModelInfo("tiny", "Llama", 64, 100)


def test_traffic_without_observations_has_no_quantiles() -> None:
    traffic = admin_pb2.ModelTraffic(
        model="tiny",
        generated_tokens_per_s=7.0,
        first_token=admin_pb2.LatencyQuantiles(p50_s=0.5, p99_s=0.75),
        inter_token=admin_pb2.LatencyQuantiles(),
        generated_tokens_per_s_history=[1.0, 2.0],
    )
    fleet = from_message(FleetInfo, admin_pb2.GetStatusResponse(traffic=[traffic]))
    assert fleet.traffic == (
        TrafficInfo(
            "tiny",
            generated_tokens_per_s=7.0,
            first_token=LatencyInfo(0.5, 0.75),
            generated_tokens_per_s_history=(1.0, 2.0),
        ),
    )


def test_block_map_is_converted_whole() -> None:
    sequences = (MappedSequence(2, "r", 1, 9, 5),)
    slots = bytes((1, 3)), np.array([-1, 2], np.int32)
    sent = BlockMap(1, 3, 1, bytes((3, 1, 0)), np.array([2, -1, -1], np.int32), sequences, *slots)
    assert from_message(BlockMapInfo, block_map_to_message(sent)) == BlockMapInfo(
        3, 1, bytes((3, 1, 0)), (2, -1, -1), sequences, bytes((1, 3)), (-1, 2)
    )
