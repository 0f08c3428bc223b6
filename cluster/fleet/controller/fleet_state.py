"""Messages between gateways and the controller: the FleetState or its changes, and the Demand of a gateway."""

from __future__ import annotations

from collections import OrderedDict
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
        gateways: ids of the gateways that follow the controller; empty until it knows them, and None if it is of an
            earlier release and never does.
    """

    version: str
    deployments: tuple[DeploymentEntry, ...] = ()
    replicas: tuple[ReplicaEntry, ...] = ()
    nodes: tuple[NodeEntry, ...] = ()
    gateways: tuple[str, ...] | None = None

    def replicas_of(self, model: str) -> list[ReplicaEntry]:
        """Return the replicas of a model."""
        return [entry for entry in self.replicas if entry.model == model]


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """Difference of two states of one controller, or a whole state.

    Attributes:
        since: version of the state that has changed; empty for a whole state.
        version: version of the new state.
        deployments: all of them.
        replicas: the replicas that are new or have changed.
        removed: ids of replicas that are gone.
        nodes: all of them; None if they are as before.
        gateways: the same.
    """

    since: str
    version: str
    deployments: tuple[DeploymentEntry, ...]
    replicas: tuple[ReplicaEntry, ...]
    removed: tuple[str, ...] = ()
    nodes: tuple[NodeEntry, ...] | None = None
    gateways: tuple[str, ...] | None = None

    def applied_to(self, state: FleetState) -> FleetState:
        """Return the new state; `state` must have the version `since`, or be any if this is a whole state."""
        assert self.since in ("", state.version), f"changes since {self.since}, the state is {state.version}"
        replicas = {} if not self.since else {entry.replica_id: entry for entry in state.replicas}
        replicas |= {entry.replica_id: entry for entry in self.replicas}
        for replica_id in self.removed:
            replicas.pop(replica_id, None)
        nodes = state.nodes if self.nodes is None else self.nodes
        # A controller of an earlier release sends changes without the last field, which unpickling leaves out.
        gateways: tuple[str, ...] | None = getattr(self, "gateways", None)
        if gateways is None and self.since:
            gateways = state.gateways
        return FleetState(self.version, self.deployments, tuple(replicas.values()), nodes, gateways)


class ChangeLog:
    """The latest state, with the number of the update in which each of its replicas last changed.

    Args:
        max_removed: replicas that are gone and are remembered. Who knows an earlier state gets a whole state.
    """

    def __init__(self, max_removed: int = 1000) -> None:
        self._max_removed = max_removed
        self._state = FleetState("")
        self._replicas: OrderedDict[str, tuple[int, ReplicaEntry]] = OrderedDict()  # the latest change last
        self._removed: OrderedDict[str, int] = (
            OrderedDict()
        )  # replica_id |-> number of the update, the latest last
        self._nodes_changed = self._gateways_changed = 0
        self._oldest = 0  # changes since an earlier update are not known

    def update(self, number: int, state: FleetState) -> None:
        """Record the state of update `number`; numbers grow, and begin with 1."""
        for entry in state.replicas:
            known = self._replicas.get(entry.replica_id)
            if known is None or known[1] != entry:
                self._replicas[entry.replica_id] = number, entry
                self._replicas.move_to_end(entry.replica_id)
                self._removed.pop(entry.replica_id, None)
        if len(self._replicas) > len(state.replicas):
            for replica_id in self._replicas.keys() - {entry.replica_id for entry in state.replicas}:
                del self._replicas[replica_id]
                self._removed[replica_id] = number
        while len(self._removed) > self._max_removed:
            _, self._oldest = self._removed.popitem(last=False)
        if state.nodes != self._state.nodes:
            self._nodes_changed = number
        if state.gateways != self._state.gateways:
            self._gateways_changed = number
        self._state = state

    def since(self, number: int, version: str) -> FleetChanges:
        """Return the changes since update `number`, whose state had that version, or the whole state."""
        state = self._state
        if number < max(1, self._oldest):
            return FleetChanges(
                "", state.version, state.deployments, state.replicas, (), state.nodes, state.gateways
            )
        changed, removed = list[ReplicaEntry](), list[str]()
        for changed_at, entry in reversed(self._replicas.values()):
            if changed_at <= number:
                break
            changed.append(entry)
        for replica_id, removed_at in reversed(self._removed.items()):
            if removed_at <= number:
                break
            removed.append(replica_id)
        nodes = state.nodes if self._nodes_changed > number else None
        gateways = state.gateways if self._gateways_changed > number else None
        return FleetChanges(
            version,
            state.version,
            state.deployments,
            tuple(reversed(changed)),
            tuple(removed),
            nodes,
            gateways,
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """One gateway's requests for one model, and their prompt tokens, as input of the autoscaler.

    Attributes:
        num_requests, num_tokens: the requests that arrived since the last report.
        num_waiting, num_waiting_tokens: the requests that wait for a replica now.
        num_prefill_tokens: the part of `num_tokens` that was sent to replicas which compute prompts for others.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_prefill_tokens: int = 0

    def of_role(self, role: str) -> Demand:
        """Return what the autoscaler of the replicas of a role is to see."""
        # A gateway of an earlier release sends a demand without the last field, which unpickling leaves out.
        num_prefill_tokens = getattr(self, "num_prefill_tokens", 0)
        if role == "prefill":
            return Demand(int(num_prefill_tokens > 0), num_prefill_tokens)
        return Demand(
            self.num_requests,
            max(0, self.num_tokens - num_prefill_tokens),
            self.num_waiting,
            self.num_waiting_tokens,
        )


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
