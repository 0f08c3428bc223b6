"""Fleet: the controller without Ray. It starts, watches, drains and ends replicas until all is as it is wanted.

Everything here runs in one event loop; what blocks (launching, adopting, ending) is handed to threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ...proto.errors import InvalidRequest, ModelNotFound
from ..config.deployment import Deployment
from ..controller_api.demand import Demand
from ..controller_api.fleet_state import DeploymentEntry, FleetState, ReplicaState
from ..host.backoff import Backoff
from ..host.change_notifier import ChangeNotifier
from .autoscaler import Decision, ScalingState, decide
from .blocking_calls import BlockingCalls
from .fleet_store import FleetStore
from .interfaces import Launcher, Store
from .nodes import LEAVE_PATIENCE_S, NodeWatch
from .reconcile import plan
from .replica_lifecycle import LifecycleContext, ReplicaLifecycle
from .snapshot import DemandBook, observe

TICK_S = 1.0
# How often the cluster's nodes are looked at.
NODES_S = 3.0
CANARY_TIMEOUT_S = 120.0
# Ended replicas that are still told of: an operator reads why they failed.
MAX_ENDED_TOLD = 20
_ENDED = ReplicaState.STOPPED, ReplicaState.FAILED

_log = logging.getLogger(__name__)


def _start_backoff() -> Backoff:
    """Return the delays between launches after replicas failed to start."""
    return Backoff(first_s=1.0, max_s=120.0)


@dataclass(slots=True)
class _Model:
    """A deployment and how it goes."""

    deployment: Deployment
    scaling: ScalingState
    decision: Decision
    backoff: Backoff = field(default_factory=_start_backoff)
    demand: DemandBook = field(default_factory=DemandBook)
    problem: str = ""


class Fleet:
    """All replicas of a cluster.

    Args:
        clock: seconds that only grow.
        wall_clock: Unix time, in which deadlines of nodes are told.
        tick_s: between two rounds in which nothing happens.
        canary_timeout_s: how long the first token of a replica may take.
    """

    def __init__(
        self,
        launcher: Launcher,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        tick_s: float = TICK_S,
        canary_timeout_s: float = CANARY_TIMEOUT_S,
    ) -> None:
        self._launcher = launcher
        self._memory = FleetStore(store)
        self._clock = clock
        self._tick_s = tick_s
        self._threads = BlockingCalls()
        self._models: dict[str, _Model] = {}
        self._replicas: dict[str, ReplicaLifecycle] = {}
        self._surroundings = LifecycleContext(
            launcher,
            self._memory,
            self._threads,
            clock,
            canary_timeout_s,
            on_state=self._take_state,
            on_progress=self._note_change,
        )
        self._nodes_seen_at = -math.inf
        self._epoch, self._version = secrets.token_hex(4), 0
        self._changes = ChangeNotifier()
        self._due = asyncio.Event()
        # Changes of what is wanted come one after the other, so that memory and deployments stay the same.
        self._changing = asyncio.Lock()
        self._nodes = NodeWatch(launcher, clock, wall_clock, on_leave=self._due.set)

    async def recover(self) -> None:
        """Takes over what an earlier controller left: its deployments, its replicas that live, and nothing else."""
        deployments, replicas = await self._threads.call("reading the fleet's memory", self._memory.read)
        for deployment in deployments:
            self._add_model(deployment)
        for deployment, record in replicas:
            self._add_replica(record.replica_id, deployment).adopt(record)
        known = await self._threads.call("looking for replicas", self._launcher.known)
        for replica_id in known - set(self._replicas):
            _log.warning("%s was left half started, and is ended", replica_id)
            await self._threads.call(f"removing {replica_id}", self._launcher.remove, replica_id)
        self._note_change()

    async def run(self) -> None:
        """Keeps the fleet as it is wanted, until cancelled."""
        while True:
            self._due.clear()
            try:
                await self.step()
            except Exception:
                _log.exception("a round of the fleet's upkeep failed; the next one begins anew")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._due.wait()

    async def step(self) -> None:
        """One round: looks at nodes and loads, decides, and begins what is to be done."""
        if self._clock() - self._nodes_seen_at >= NODES_S:
            await self._look_at_nodes()
        for replica in self._replicas.values():
            leave = self._nodes.departure_of(replica.node_ids)
            if leave is not None:  # what runs there drains while the node is still there
                replica.leave(leave.by - replica.deployment.drain_grace_s, leave.reason)
        for model in list(self._models.values()):
            self._scale(model)
            self._reconcile(model)
        for replica in list(self._replicas.values()):
            if replica.deployment.name not in self._models:
                replica.drain("its model is served no longer")
        self._forget_ended()

    async def deploy(self, deployment: Deployment) -> None:
        """Serves a model, or serves it otherwise from now on."""
        async with self._changing:
            what = f"remembering {deployment.name}"
            await self._threads.call(what, self._memory.keep_deployment, deployment)
            model = self._models.get(deployment.name)
            if model is None:
                self._add_model(deployment)
            else:
                if model.deployment.version != deployment.version:
                    model.backoff, model.problem = _start_backoff(), ""
                model.deployment = deployment
        self._note_change()
        self._due.set()

    async def delete(self, name: str) -> None:
        """Serves a model no longer; its replicas drain, with nowhere to move their requests to.

        Raises:
            ModelNotFound: it is not deployed.
        """
        async with self._changing:
            if name not in self._models:
                raise ModelNotFound(f"model {name!r} is not deployed")
            await self._threads.call(f"forgetting {name}", self._memory.forget_deployment, name)
            del self._models[name]
        self._note_change()
        self._due.set()

    async def drain(self, target: str) -> tuple[str, ...]:
        """Empties a replica, or all of a node; returns the replicas.

        Raises:
            InvalidRequest: there is none of that name, or more than one.
        """
        await self._look_at_nodes()
        nodes = [node.node_id for node in self._nodes.nodes]
        running = [each.replica_id for each in self._replicas.values() if each.state not in _ENDED]
        found = [name for name in (*running, *nodes) if target and name.startswith(target)]
        if len(found) != 1:
            what = f"fits {len(found)} of" if found else "is none of"
            raise InvalidRequest("target", f"is {target!r}, which {what} the replicas and nodes that run")
        (name,) = found
        if name in self._replicas:
            leaving = [self._replicas[name]]
            leaving[0].leave(self._clock() + LEAVE_PATIENCE_S, "an operator drains it")
        else:
            await self._threads.call(f"cordoning node {name[:12]}", self._launcher.cordon, name)
            self._nodes.leave(name, LEAVE_PATIENCE_S, f"an operator drains node {name[:12]}")
            leaving = [each for each in self._replicas.values() if name in each.node_ids]
        self._due.set()
        return tuple(replica.replica_id for replica in leaving)

    def report(self, gateway_id: str, demand: Mapping[str, Demand]) -> None:
        """What came to a gateway since its last report, by model."""
        for name, count in demand.items():
            model = self._models.get(name)
            if model is not None:
                model.demand.add(gateway_id, count, self._clock())
                if count.num_waiting:
                    self._due.set()

    def table(self) -> FleetState:
        """What there is to tell now."""
        return FleetState(
            f"{self._epoch}-{self._version}",
            tuple(
                DeploymentEntry(model.deployment, model.decision.target, model.decision.reason, model.problem)
                for model in self._models.values()
            ),
            tuple(replica.entry() for replica in self._replicas.values()),
            self._nodes.nodes,
        )

    async def watch(self, since: str, timeout_s: float) -> FleetState | None:
        """The table, once it differs from the version that the caller has; None: it has not in that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while since == f"{self._epoch}-{self._version}":
                    await self._changes.wait()
                return self.table()
        return None

    async def close(self) -> None:
        """Forgets everything, and leaves the replicas as they are."""
        replicas, self._replicas = list(self._replicas.values()), {}
        await asyncio.gather(*(replica.abandon() for replica in replicas))
        self._threads.close()

    def _add_model(self, deployment: Deployment) -> None:
        scaling = ScalingState()
        first = Decision(deployment.limits.min_replicas, "the least that is asked for", scaling)
        self._models[deployment.name] = _Model(deployment, scaling, first)

    def _add_replica(self, replica_id: str, deployment: Deployment) -> ReplicaLifecycle:
        replica = self._replicas[replica_id] = ReplicaLifecycle(replica_id, deployment, self._surroundings)
        self._note_change()
        return replica

    def _replicas_of(self, name: str) -> list[ReplicaLifecycle]:
        return [each for each in self._replicas.values() if each.deployment.name == name]

    async def _look_at_nodes(self) -> None:
        self._nodes_seen_at, before = self._clock(), self._nodes.nodes
        nodes = await self._threads.call("looking at the nodes", self._launcher.nodes)
        self._nodes.update(nodes, {name for each in self._replicas.values() for name in each.node_ids})
        if nodes != before:
            self._note_change()

    def _scale(self, model: _Model) -> None:
        now = self._clock()
        replicas = [(each.state, each.status) for each in self._replicas_of(model.deployment.name)]
        snapshot = observe(now, replicas, model.demand, model.deployment.engine.max_num_seqs)
        decision = decide(snapshot, model.deployment.limits, model.scaling)
        model.scaling = decision.state
        if (decision.target, decision.reason) != (model.decision.target, model.decision.reason):
            if decision.target != model.decision.target:
                _log.info("%s: %d replicas: %s", model.deployment.name, decision.target, decision.reason)
            self._note_change()
        model.decision = decision

    def _reconcile(self, model: _Model) -> None:
        now, version = self._clock(), model.deployment.version
        replicas = self._replicas_of(model.deployment.name)
        todo = plan(model.decision.target, version, [each.standing() for each in replicas], now)
        for replica in (self._replicas[name] for name in todo.stop):
            replica.stop(replica.leave_reason or "it is not needed any more")
        for replica in (self._replicas[name] for name in todo.drain):
            replica.drain(replica.leave_reason or _why_drained(model, replica))
        if any(each.is_proven(now) and each.deployment.version == version for each in replicas):
            model.backoff.reset()
        for _ in range(self._num_starts(model, todo.num_starts)):
            self._add_replica(f"replica-{secrets.token_hex(4)}", model.deployment).launch()

    def _num_starts(self, model: _Model, num_wanted: int) -> int:
        """After a failure one tries, once it is time, whether it goes now."""
        if model.backoff.num_failures == 0:
            return num_wanted
        replicas = self._replicas_of(model.deployment.name)
        is_tried = any(each.state is ReplicaState.STARTING for each in replicas)
        return 0 if is_tried or not model.backoff.is_due(self._clock()) else min(num_wanted, 1)

    def _take_state(self, replica: ReplicaLifecycle) -> None:
        """A replica has come to another state."""
        model = self._models.get(replica.deployment.name)
        if model is not None and model.deployment.version == replica.deployment.version:
            if replica.state is ReplicaState.READY:
                self._note_success(model, replica)
            elif replica.state is ReplicaState.FAILED:
                self._note_failure(model, replica)
        self._note_change()
        self._due.set()

    def _note_success(self, model: _Model, replica: ReplicaLifecycle) -> None:
        model.problem = ""
        if not replica.is_adopted:  # which is much quicker than a start
            model.demand.cold_start_s = self._clock() - replica.since

    def _note_failure(self, model: _Model, replica: ReplicaLifecycle) -> None:
        model.problem = f"{replica.replica_id}: {replica.reason}"
        # One that served for a while and then died is replaced at once.
        if not replica.is_proven(self._clock()):
            wait_s = model.backoff.fail(self._clock())
            _log.warning("%s: the next start is in %g s", model.deployment.name, wait_s)

    def _forget_ended(self) -> None:
        """Only the latest ones are told of."""
        ended = [replica_id for replica_id, replica in self._replicas.items() if replica.is_over]
        for replica_id in ended[:-MAX_ENDED_TOLD]:
            del self._replicas[replica_id]
            self._note_change()

    def _note_change(self) -> None:
        self._version += 1
        self._changes.notify()


def _why_drained(model: _Model, replica: ReplicaLifecycle) -> str:
    if replica.deployment.version != model.deployment.version:
        return f"version {model.deployment.version} takes over"
    return f"{model.decision.target} replicas are enough: {model.decision.reason}"
