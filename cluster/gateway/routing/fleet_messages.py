"""Conversion of a FleetState to the status messages of quire.v1.Admin."""

from __future__ import annotations

from ....proto import admin_pb2
from ...fleet.controller.fleet_state import DeploymentEntry, FleetState, NodeEntry, ReplicaEntry, ReplicaState

_STATES = {
    ReplicaState.STARTING: admin_pb2.REPLICA_STATE_STARTING,
    ReplicaState.READY: admin_pb2.REPLICA_STATE_READY,
    ReplicaState.DRAINING: admin_pb2.REPLICA_STATE_DRAINING,
    ReplicaState.STOPPED: admin_pb2.REPLICA_STATE_STOPPED,
    ReplicaState.FAILED: admin_pb2.REPLICA_STATE_FAILED,
}


def fleet_state_to_message(state: FleetState, problem: str) -> admin_pb2.GetStatusResponse:
    """Convert a state; `problem` is why the state may be out of date, empty if it is current."""
    return admin_pb2.GetStatusResponse(
        replicas=map(_replica_to_message, state.replicas),
        deployments=map(_deployment_to_message, state.deployments),
        nodes=map(_node_to_message, state.nodes),
        problem=problem,
    )


def _replica_to_message(entry: ReplicaEntry) -> admin_pb2.Replica:
    state, problem = entry.state, entry.reason
    if entry.drain_reason:
        # It still gets requests, but an operator's drain is to be seen at once.
        state = ReplicaState.DRAINING
        problem = f"{entry.drain_reason}; it gets requests until another replica is ready"
    return admin_pb2.Replica(
        replica_id=entry.replica_id,
        model=entry.model,
        state=_STATES[state],
        version=entry.version,
        problem=problem,
        node_ids=() if entry.record is None else entry.record.node_ids,
    )


def _deployment_to_message(entry: DeploymentEntry) -> admin_pb2.DeploymentStatus:
    limits = entry.deployment.limits
    return admin_pb2.DeploymentStatus(
        model=entry.deployment.name,
        version=entry.deployment.version,
        min_replicas=limits.min_replicas,
        max_replicas=limits.max_replicas,
        target_replicas=entry.target,
        reason=entry.reason,
        problem=entry.problem,
    )


def _node_to_message(entry: NodeEntry) -> admin_pb2.Node:
    return admin_pb2.Node(
        node_id=entry.node_id,
        address=entry.address,
        draining=entry.is_draining,
        resources=dict(entry.resources),
    )
