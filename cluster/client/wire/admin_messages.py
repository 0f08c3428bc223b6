"""Conversions of models, replicas, deployments, nodes and commands to and from the messages of quire.v1.Admin."""

from __future__ import annotations

from ....proto import admin_pb2
from ....proto.block_map import BlockMap
from ....proto.engine_command import PauseMode
from ....proto.errors import ConfigError, InvalidRequest, ProtocolError
from ....proto.replica_status import ReplicaStatus
from ...config.deployment import Deployment
from ...text.requests.engine_commands import read_mode
from .message_fields import from_message, to_message
from .status import DeploymentInfo, FleetEvent, NodeInfo, ReplicaInfo

# Kinds of objects of a FleetEvent.
_KINDS: dict[str | None, type[DeploymentInfo | ReplicaInfo | NodeInfo]] = {
    "deployment": DeploymentInfo,
    "replica": ReplicaInfo,
    "node": NodeInfo,
}


def replica_to_message(
    status: ReplicaStatus, problem: str, silence_s: float = 0.0, age_s: float = 0.0
) -> admin_pb2.Replica:
    """Convert a replica's status.

    Args:
        problem: why the gateway sends the replica no requests; empty if it sends some.
        silence_s: time since the replica's latest message, while one is due.
        age_s: time since the status.
    """
    return to_message(
        admin_pb2.Replica,
        status,
        ready=not problem,
        problem=problem,
        kv=to_message(admin_pb2.KvUse, status, fullest_kv_use=status.fullest_use),
        queue=to_message(admin_pb2.Queue, status),
        silence_s=silence_s,
        activity_s=status.activity_s + age_s,
        paused=status.is_paused,
    )


def block_map_to_message(blocks: BlockMap) -> admin_pb2.GetBlockMapResponse:
    return to_message(
        admin_pb2.GetBlockMapResponse, blocks, rows=blocks.rows.tolist(), slot_rows=blocks.slot_rows.tolist()
    )


def fleet_event_from_message(message: admin_pb2.WatchEventsResponse) -> FleetEvent:
    """Raises ProtocolError for an object that only later versions of quire have."""
    kind = message.WhichOneof("object")
    if kind not in _KINDS:
        raise ProtocolError("the server sent an event that this version of the client does not support")
    changed = from_message(_KINDS[kind], getattr(message, kind))
    return from_message(FleetEvent, message, object=changed, is_removed=message.removed)


def deployment_to_message(deployment: Deployment) -> admin_pb2.Deployment:
    """Raises ConfigError for a value that the message cannot hold."""
    try:
        return to_message(admin_pb2.Deployment, deployment)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the deployment of {deployment.name!r} cannot be sent: {error}") from error


def deployment_from_message(message: admin_pb2.Deployment) -> Deployment:
    """Raises ConfigError for a missing model or a value out of its range."""
    if not message.engine.model:
        raise ConfigError("deployment.engine.model is empty, must be a model directory or ORG/NAME")
    return from_message(Deployment, message)


_MODES: dict[int, PauseMode] = {
    admin_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.KEEP,
    admin_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
    admin_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    admin_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
}


def mode_from_message(number: int) -> PauseMode:
    """Raises InvalidRequest for a number of a later release."""
    if number not in _MODES:
        raise InvalidRequest("mode", f"is {number}, which this version of quire does not support")
    return _MODES[number]


def mode_to_message(text: str) -> str:
    """Return the name of an enum value. Raises InvalidRequest for an unknown mode."""
    return f"PAUSE_MODE_{read_mode(text).name}"
