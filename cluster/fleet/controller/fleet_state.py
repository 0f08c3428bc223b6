"""What gateways and the controller tell each other: the FleetState, and the Demand of a gateway. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...config.deployment import Deployment
from ..replica.record import ReplicaRecord


class ReplicaState(StrEnum):
    """Stage of a replica's life. FAILED and STOPPED replicas have no processes."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DeploymentEntry:
    """A deployment and its scaling target.

    Attributes:
        target: number of replicas that the autoscaler wants.
        reason: why that number.
        problem: why the last start of a replica failed; empty after one succeeded.
    """

    deployment: Deployment
    target: int
    reason: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """A replica.

    Attributes:
        reason: what a starting replica waits for, or why a replica drains or failed.
        record: how to reach the replica; None until it has loaded.
        drain_reason: why a ready replica drains as soon as another one is ready; empty if it stays.
    """

    replica_id: str
    model: str
    version: str
    state: ReplicaState
    reason: str = ""
    record: ReplicaRecord | None = None
    drain_reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """A live node of the cluster.

    Attributes:
        is_draining: Ray places nothing on the node any more.
        gone_at: Unix time at which the node ends; 0 if that is not known.
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
        version: differs between any two states, also of different controllers.
    """

    version: str
    deployments: tuple[DeploymentEntry, ...] = ()
    replicas: tuple[ReplicaEntry, ...] = ()
    nodes: tuple[NodeEntry, ...] = ()

    def replicas_of(self, model: str) -> list[ReplicaEntry]:
        """Return the replicas of a model."""
        return [entry for entry in self.replicas if entry.model == model]


@dataclass(frozen=True, slots=True)
class Demand:
    """One gateway's requests for one model, and their prompt tokens, as input of the autoscaler.

    Attributes:
        num_requests, num_tokens: the requests that arrived since the last report.
        num_waiting, num_waiting_tokens: the requests that wait for a replica now.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Deploy:
    """Add or change a deployment."""

    deployment: Deployment


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove the deployment of a model."""

    model: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain a replica or all replicas of a node, by id or unique prefix."""

    target: str


@dataclass(frozen=True, slots=True)
class Undrain:
    """Take back the drain of a replica, by id or unique prefix, that waits for another one to take over."""

    target: str


@dataclass(frozen=True, slots=True)
class SetScale:
    """Change the bounds of a deployment's replicas; None keeps one."""

    model: str
    min_replicas: int | None
    max_replicas: int | None


FleetCommand = Deploy | Delete | Drain | Undrain | SetScale
