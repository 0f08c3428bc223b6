"""Conversions of models, replicas, deployments and nodes to and from the status messages of quire.v1."""

from __future__ import annotations

from ....proto import admin_pb2
from ....proto.block_map import BlockMap
from ....proto.errors import ProtocolError
from ....proto.replica_status import ReplicaStatus
from .message_fields import from_message, to_message
from .status import DeploymentInfo, FleetEvent, NodeInfo, ReplicaInfo

# Kinds of objects of a FleetEvent.
_KINDS: dict[str | None, type[DeploymentInfo | ReplicaInfo | NodeInfo]] = {
    "deployment": DeploymentInfo,
    "replica": ReplicaInfo,
    "node": NodeInfo,
}


def replica_to_message(status: ReplicaStatus, problem: str, silence_s: float = 0.0) -> admin_pb2.Replica:
    """Convert a replica's status.

    Args:
        problem: why the gateway sends the replica no requests; empty if it sends some.
        silence_s: time since the replica's latest message.
    """
    return to_message(
        admin_pb2.Replica,
        status,
        ready=not problem,
        problem=problem,
        kv=to_message(admin_pb2.KvUse, status, fullest_kv_use=status.fullest_use),
        queue=to_message(admin_pb2.Queue, status),
        silence_s=silence_s,
        activity_s=status.activity_s + silence_s,
        paused=status.is_paused,
    )


def block_map_to_message(blocks: BlockMap) -> admin_pb2.GetBlockMapResponse:
    return to_message(admin_pb2.GetBlockMapResponse, blocks, rows=blocks.rows.tolist())


def fleet_event_from_message(message: admin_pb2.WatchEventsResponse) -> FleetEvent:
    """Raises ProtocolError for an object that only later versions of quire have."""
    kind = message.WhichOneof("object")
    if kind not in _KINDS:
        raise ProtocolError("the server sent an event that this version of the client does not support")
    changed = from_message(_KINDS[kind], getattr(message, kind))
    return from_message(FleetEvent, message, object=changed, is_removed=message.removed)
