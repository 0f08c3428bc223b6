"""Conversions of models, replicas, deployments and nodes to and from the status messages of quire.v1."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from ...proto import admin_pb2, inference_pb2
from ...proto.stream import RankStatus, ReplicaStatus
from .status import DeploymentInfo, FleetInfo, KvCacheInfo, ModelInfo, NodeInfo, QueueInfo, ReplicaInfo

_STATE_PREFIX = "REPLICA_STATE_"

T = TypeVar("T")


def replica_to_message(status: ReplicaStatus, problem: str) -> admin_pb2.Replica:
    """`problem`: why the gateway sends the replica no requests; empty if it sends some."""
    return admin_pb2.Replica(
        replica_id=status.replica_id,
        model=status.model,
        ready=not problem,
        problem=problem,
        ranks=map(_rank_to_message, status.ranks),
        kv=admin_pb2.KvUse(
            block_size=status.block_size,
            num_blocks=status.num_blocks,
            num_used_blocks=status.num_used_blocks,
            num_cached_blocks=status.num_cached_blocks,
            peak_used_blocks=status.peak_used_blocks,
            num_used_tokens=status.num_used_tokens,
            mean_kv_fragmentation=status.mean_kv_fragmentation,
            prefix_query_tokens=status.prefix_query_tokens,
            prefix_hit_tokens=status.prefix_hit_tokens,
            num_host_blocks=status.num_host_blocks,
            num_used_host_blocks=status.num_used_host_blocks,
            num_cached_host_blocks=status.num_cached_host_blocks,
            num_swapped_blocks=status.num_swapped_blocks,
        ),
        queue=admin_pb2.Queue(
            num_waiting=status.num_waiting,
            num_running=status.num_running,
            num_finished=status.num_finished,
            num_preemptions=status.num_preemptions,
        ),
        num_steps=status.num_steps,
        uptime_s=status.uptime_s,
        mean_plan_wait_s=status.mean_plan_wait_s,
    )


def _rank_to_message(rank: RankStatus) -> admin_pb2.Rank:
    return admin_pb2.Rank(rank=rank.rank, pid=rank.pid, node=rank.node, device=rank.device, stage=rank.stage)


def model_from_message(message: inference_pb2.Model) -> ModelInfo:
    return _copy_fields(ModelInfo, message)


def fleet_from_message(message: admin_pb2.GetStatusResponse) -> FleetInfo:
    return FleetInfo(
        replicas=tuple(_replica_from_message(replica) for replica in message.replicas),
        deployments=tuple(_copy_fields(DeploymentInfo, deployment) for deployment in message.deployments),
        nodes=tuple(_copy_fields(NodeInfo, node, resources=dict(node.resources)) for node in message.nodes),
        problem=message.problem,
    )


def _replica_from_message(message: admin_pb2.Replica) -> ReplicaInfo:
    return _copy_fields(
        ReplicaInfo,
        message,
        state=_state_from_message(message.state),
        ranks=tuple(_copy_fields(RankStatus, rank) for rank in message.ranks),
        node_ids=tuple(message.node_ids),
        kv=_copy_fields(KvCacheInfo, message.kv),
        queue=_copy_fields(QueueInfo, message.queue),
    )


def _state_from_message(state: admin_pb2.ReplicaState) -> str | None:
    if state == admin_pb2.REPLICA_STATE_UNSPECIFIED:
        return None
    return admin_pb2.ReplicaState.Name(state).removeprefix(_STATE_PREFIX).lower()


def _copy_fields(kind: type[T], message: Message, **converted: Any) -> T:
    """Return an instance of the dataclass: `converted`, and the message's values of all other fields."""
    names = [field.name for field in fields(kind) if field.name not in converted]  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names}, **converted)
