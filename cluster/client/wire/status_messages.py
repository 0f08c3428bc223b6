"""Conversions of models, replicas, deployments and nodes to and from the status messages of quire.v1."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from ....proto import admin_pb2, inference_pb2
from ....proto.block_map import BlockMap, MappedSequence
from ....proto.errors import ProtocolError
from ....proto.replica_status import RankStatus, ReplicaStatus
from .status import (
    BlockMapInfo,
    DeploymentInfo,
    FleetEvent,
    FleetInfo,
    KvCacheInfo,
    LatencyInfo,
    ModelInfo,
    ModelLoad,
    NodeInfo,
    QueueInfo,
    ReplicaInfo,
    ServerInfo,
    TrafficInfo,
)

_STATE_PREFIX = "REPLICA_STATE_"

T = TypeVar("T")


def replica_to_message(status: ReplicaStatus, problem: str, silence_s: float = 0.0) -> admin_pb2.Replica:
    """Convert a replica's status.

    Args:
        problem: why the gateway sends the replica no requests; empty if it sends some.
        silence_s: time since the replica's latest message.
    """
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
            num_fenced_blocks=status.num_fenced_blocks,
            fullest_kv_use=max(status.kv_use, status.fullest_kv_use),
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
        silence_s=silence_s,
        num_computed_tokens=status.num_computed_tokens,
        busy_s=status.busy_s,
        queued_tokens=status.queued_tokens,
        oldest_wait_s=status.oldest_wait_s,
        tokens_per_s=status.tokens_per_s,
        num_compilations=status.num_compilations,
        activity=status.activity,
        activity_s=status.activity_s + silence_s,
        num_recoveries=status.num_recoveries,
        weights_version=status.weights_version,
        paused=status.is_paused,
        sleep_level=status.sleep_level,
    )


def block_map_to_message(blocks: BlockMap) -> admin_pb2.GetBlockMapResponse:
    return admin_pb2.GetBlockMapResponse(
        num_blocks=blocks.num_blocks,
        stride=blocks.stride,
        states=blocks.states,
        rows=blocks.rows.tolist(),
        sequences=[admin_pb2.MappedSequence(**asdict(sequence)) for sequence in blocks.sequences],
    )


def block_map_from_message(message: admin_pb2.GetBlockMapResponse) -> BlockMapInfo:
    sequences = tuple(_copy_fields(MappedSequence, sequence) for sequence in message.sequences)
    return _copy_fields(BlockMapInfo, message, rows=tuple(message.rows), sequences=sequences)


def _rank_to_message(rank: RankStatus) -> admin_pb2.Rank:
    return admin_pb2.Rank(rank=rank.rank, pid=rank.pid, node=rank.node, device=rank.device, stage=rank.stage)


def model_from_message(message: inference_pb2.Model) -> ModelInfo:
    return _copy_fields(ModelInfo, message)


def server_info_from_message(message: inference_pb2.GetServerInfoResponse) -> ServerInfo:
    return _copy_fields(ServerInfo, message, models=tuple(map(model_from_message, message.models)))


def load_from_message(message: admin_pb2.ModelLoad) -> ModelLoad:
    delay_s = message.queue_delay_s if message.HasField("queue_delay_s") else None
    return _copy_fields(ModelLoad, message, queue_delay_s=delay_s)


def event_from_message(message: admin_pb2.WatchEventsResponse) -> FleetEvent:
    """Raises ProtocolError for an object that only later versions of quire have."""
    kind = message.WhichOneof("object")
    if kind == "deployment":
        changed: DeploymentInfo | ReplicaInfo | NodeInfo = _copy_fields(DeploymentInfo, message.deployment)
    elif kind == "replica":
        changed = _replica_from_message(message.replica)
    elif kind == "node":
        changed = _node_from_message(message.node)
    else:
        raise ProtocolError("the server sent an event that this version of the client does not support")
    return FleetEvent(message.time, changed, message.removed)


def _node_from_message(message: admin_pb2.Node) -> NodeInfo:
    return _copy_fields(NodeInfo, message, resources=dict(message.resources))


def fleet_from_message(message: admin_pb2.GetStatusResponse) -> FleetInfo:
    return FleetInfo(
        replicas=tuple(_replica_from_message(replica) for replica in message.replicas),
        deployments=tuple(_copy_fields(DeploymentInfo, deployment) for deployment in message.deployments),
        nodes=tuple(map(_node_from_message, message.nodes)),
        problem=message.problem,
        traffic=tuple(_traffic_from_message(traffic) for traffic in message.traffic),
    )


def _traffic_from_message(message: admin_pb2.ModelTraffic) -> TrafficInfo:
    return _copy_fields(
        TrafficInfo,
        message,
        first_token=_latency_from_message(message.first_token),
        inter_token=_latency_from_message(message.inter_token),
        generated_tokens_per_s_history=tuple(message.generated_tokens_per_s_history),
    )


def _latency_from_message(message: admin_pb2.LatencyQuantiles) -> LatencyInfo:
    given = {name: getattr(message, name) if message.HasField(name) else None for name in ("p50_s", "p99_s")}
    return LatencyInfo(**given)


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
