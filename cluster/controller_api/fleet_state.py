"""FleetState: what the controller tells gateways and operators of the fleet. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ..config.deployment import Deployment
from ..replica.replica import ReplicaRecord


class ReplicaState(StrEnum):
    """Where a replica stands. FAILED and STOPPED ones have no process any more."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DeploymentEntry:
    """A deployment, and what the controller makes of it.

    Attributes:
        target: replicas that the autoscaler wants.
        reason: why so many.
        problem: why the last replica that was to be started was not; empty once one was.
    """

    deployment: Deployment
    target: int
    reason: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """A replica.

    Attributes:
        reason: what it waits for, or why it drains or failed.
        record: how to reach it; None while it has not loaded.
    """

    replica_id: str
    model: str
    version: str
    state: ReplicaState
    reason: str = ""
    record: ReplicaRecord | None = None


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """A live node of the cluster.

    Attributes:
        is_draining: Ray places nothing on it any more.
        gone_at: when it will be gone, in Unix time; 0: it is not known.
    """

    node_id: str
    address: str
    resources: tuple[tuple[str, float], ...] = ()
    is_draining: bool = False
    gone_at: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetState:
    """The fleet at one moment.

    Attributes:
        version: differs from that of any other state, of earlier controllers too.
    """

    version: str
    deployments: tuple[DeploymentEntry, ...] = ()
    replicas: tuple[ReplicaEntry, ...] = ()
    nodes: tuple[NodeEntry, ...] = field(default=())
