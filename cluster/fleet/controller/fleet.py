"""Fleet: the controller without Ray. Starts, watches, drains and ends replicas until the fleet is as deployed.

Everything here runs in one event loop; blocking calls (launching, adopting, removing) run in threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ....proto.errors import InvalidRequest, ModelNotFound
from ....proto.stream import encode
from ...config.deployment import Deployment
from ...os_utils.backoff import Backoff
from ...os_utils.event_loop import ChangeNotifier
from .autoscaler import Decision, DemandCounter, ScalingState, decide, take_snapshot
from .fleet_state import (
    ChangeLog,
    Delete,
    Demand,
    Deploy,
    DeploymentEntry,
    Drain,
    FleetCommand,
    FleetState,
    ReplicaState,
    SetScale,
    Undrain,
)
from .gateways import GatewayRegistry
from .interfaces import BlockingCalls, FleetStore, Launcher, Store
from .nodes import TAKEOVER_TIMEOUT_S, NodeWatch
from .reconcile import plan
from .replica_lifecycle import LifecycleContext, ReplicaLifecycle

TICK_S = 1.0
# Longest time between two decisions on a fleet that has no requests and none of whose replicas starts or drains: a
# step takes 75 ms with 1,000 replicas. Without requests for a minute, time alone only lets targets fall.
REST_S = 10.0
REST_AFTER_S = 60.0
NODES_INTERVAL_S = 3.0
# Gateways learn of the changes of this time together, and at once of a change after such a time without any.
CHANGES_INTERVAL_S = 0.5
# A target's reason has numbers that change each second: gateways wait this long for one that only explains.
REASON_INTERVAL_S = 10.0
# Gateways that show replicas which they do not use get the same statuses for this time.
STATUSES_INTERVAL_S = 1.0
CANARY_TIMEOUT_S = 120.0
# Delays between launches after replicas failed to start.
FIRST_LAUNCH_RETRY_S = 1.0
MAX_LAUNCH_RETRY_S = 120.0
# Ended replicas that stay in the state, so that an operator can read why they failed.
MAX_ENDED_REPLICAS = 20

_ENDED = ReplicaState.STOPPED, ReplicaState.FAILED

_log = logging.getLogger(__name__)


def _launch_backoff() -> Backoff:
    return Backoff(FIRST_LAUNCH_RETRY_S, MAX_LAUNCH_RETRY_S)


# Model and role of its replicas.
_PartKey = tuple[str, str]


def _key_of(deployment: Deployment) -> _PartKey:
    return deployment.name, deployment.engine.role


@dataclass(slots=True)
class _Part:
    """The replicas of a deployment that have one role, with their scaling state.

    Attributes:
        deployment: one of the deployment's `parts`.
        backoff: delays the next launch after a replica of the deployed version failed to start.
        failed_at: when a failure was last counted there.
        problem: why the last start failed; empty after one succeeded.
        told_at: when gateways were last woken for the target or its reason.
    """

    deployment: Deployment
    scaling: ScalingState
    decision: Decision
    told_at: float = -math.inf
    backoff: Backoff = field(default_factory=_launch_backoff)
    failed_at: float = -math.inf
    demand: DemandCounter = field(default_factory=DemandCounter)
    problem: str = ""

    def is_settled(self, now: float) -> bool:
        """Return whether it has had no requests for a while, is as large as recommended, and delays no launch."""
        is_idle = now - self.scaling.busy_at >= REST_AFTER_S
        recommended = [number for _, number in self.scaling.recommendations[-1:]]
        return is_idle and recommended == [self.decision.target] and not self.backoff.num_failures


class Fleet:
    """All deployments and replicas of a cluster.

    Args:
        clock: monotonic time in seconds.
        wall_clock: Unix time; nodes' deadlines use it.
        tick_s: longest time between two reconciliation steps.
        canary_timeout_s: how long the first token of a replica may take.
        blocking: threads for the launcher's and the store's calls.
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
        blocking: BlockingCalls | None = None,
    ) -> None:
        self._launcher = launcher
        self._store = FleetStore(store)
        self._clock = clock
        self._tick_s = tick_s
        self._blocking = blocking or BlockingCalls()
        self._deployments: dict[str, Deployment] = {}
        self._parts: dict[_PartKey, _Part] = {}
        self._replicas: dict[str, ReplicaLifecycle] = {}
        self._context = LifecycleContext(
            launcher,
            self._store,
            self._blocking,
            clock,
            canary_timeout_s,
            on_state=self._on_replica_state,
            on_progress=self._notify_change,
        )
        self._nodes_read_at = -math.inf
        self._epoch, self._version = secrets.token_hex(4), 0
        self._log, self._logged_version = ChangeLog(), 0
        self._encoded: dict[str, bytes] = {}  # since |-> changes to the version in the log
        self._told_at = -math.inf
        self._changes = ChangeNotifier()
        self._gateways = GatewayRegistry(clock)
        self._encoded_statuses: tuple[float, bytes] = -math.inf, b""
        self._step_due = asyncio.Event()
        self._rests_until = -math.inf
        # Serializes deploy and delete, so that the store and the deployments agree.
        self._deployments_lock = asyncio.Lock()
        self._nodes = NodeWatch(launcher, clock, wall_clock, on_departure=self._wake)

    async def recover(self) -> None:
        """Restore the deployments of an earlier controller, adopt its live replicas, and remove half-started ones."""
        deployments, replicas = await self._blocking.call("reading the fleet's store", self._store.read)
        for deployment in deployments:
            self._set_deployment(deployment)
        for deployment, record in replicas:
            self._add_replica(record.replica_id, deployment).adopt(record)
        known = await self._blocking.call("listing replicas", self._launcher.known)
        for replica_id in sorted(known - set(self._replicas)):
            _log.warning("%s was half started by an earlier controller and is removed", replica_id)
            await self._blocking.call(f"removing {replica_id}", self._launcher.remove, replica_id)
        self._notify_change()

    async def run(self) -> None:
        """Reconcile until canceled."""
        while True:
            self._step_due.clear()
            try:
                await self.step()
            except Exception:
                _log.exception("a reconciliation step failed; the next one starts over")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._step_due.wait()

    async def step(self) -> None:
        """One reconciliation step: read nodes and loads, decide targets, start, drain and stop replicas."""
        if self._clock() - self._nodes_read_at >= NODES_INTERVAL_S:
            await self._read_nodes()
        if self._gateways.update():
            self._notify_change()
        if self._clock() < self._rests_until:
            return
        self._drain_departing_nodes()
        for part in list(self._parts.values()):
            self._scale(part)
            self._reconcile(part)
        for replica in list(self._replicas.values()):
            if replica.model not in self._deployments:
                replica.drain("its model was deleted")
            elif (replica.model, replica.role) not in self._parts and self._has_all_roles(replica.model):
                replica.drain("replicas of other roles replace it")
        self._drop_ended()
        if self._is_settled():
            self._rests_until = self._clock() + REST_S

    async def apply(self, command: FleetCommand) -> Mapping[str, Any]:
        """Carry out an operator's command; return the fields of its response.

        Raises:
            ModelNotFound, InvalidRequest, ConfigError: as the method of the command does.
        """
        match command:
            case Deploy(deployment):
                await self.deploy(deployment)
                return {"version": deployment.version}
            case Delete(model):
                await self.delete(model)
                return {}
            case Drain(target):
                return {"replica_ids": await self.drain(target)}
            case Undrain(target):
                return {"replica_ids": [self.undrain(target)]}
            case SetScale(model, min_replicas, max_replicas):
                least, most = await self.set_scale(model, min_replicas, max_replicas)
                return {"min_replicas": least, "max_replicas": most}

    async def deploy(self, deployment: Deployment) -> None:
        """Serve a model, or change its deployment."""
        async with self._deployments_lock:
            what = f"storing the deployment {deployment.name}"
            await self._blocking.call(what, self._store.write_deployment, deployment)
            self._set_deployment(deployment)
        self._notify_change()
        self._step_due.set()

    async def delete(self, name: str) -> None:
        """Stop serving a model. Its replicas drain; the requests that they hand off fail.

        Raises:
            ModelNotFound: the model is not deployed.
        """
        async with self._deployments_lock:
            if name not in self._deployments:
                raise ModelNotFound(f"model {name!r} is not deployed")
            await self._blocking.call(f"deleting the deployment {name}", self._store.delete_deployment, name)
            del self._deployments[name]
            self._parts = {key: part for key, part in self._parts.items() if key[0] != name}
        self._notify_change()
        self._step_due.set()

    def _is_settled(self) -> bool:
        """Return whether the next steps change nothing, unless a target falls or something happens."""
        return all(part.is_settled(self._clock()) for part in self._parts.values()) and all(
            each.state in _ENDED or (each.state is ReplicaState.READY and each.drain_by is None)
            for each in self._replicas.values()
        )

    def _wake(self) -> None:
        """Have the next step decide, and run it now."""
        self._rests_until = -math.inf
        self._step_due.set()

    async def drain(self, target: str) -> tuple[str, ...]:
        """Drain a replica or all replicas of a node, by id or unique prefix; return the ids of the replicas.

        Raises:
            InvalidRequest: no replica or node matches, or more than one does.
        """
        await self._read_nodes()
        name = self._find(target)
        if name in self._replicas:
            replicas = [self._replicas[name]]
            replicas[0].require_drain(self._clock() + TAKEOVER_TIMEOUT_S, "an operator drains it")
        else:
            await self._blocking.call(f"cordoning node {name[:12]}", self._launcher.cordon, name)
            self._nodes.depart(name, TAKEOVER_TIMEOUT_S, f"an operator drains node {name[:12]}")
            replicas = [each for each in self._replicas.values() if name in each.node_ids]
        self._step_due.set()
        return tuple(replica.replica_id for replica in replicas)

    def undrain(self, target: str) -> str:
        """Take back the drain of a replica that waits for another one to take over; return its id.

        Raises:
            InvalidRequest: no replica matches, more than one does, or the replica does not wait.
        """
        name = self._find(target)
        replica = self._replicas.get(name)
        if replica is None:
            raise InvalidRequest("target", f"is node {name[:12]}, which Ray does not take back")
        if self._nodes.departure_of(replica.node_ids) is not None:
            raise InvalidRequest("target", f"is {name}, whose node drains")
        if not replica.cancel_drain():
            raise InvalidRequest(
                "target", f"is {name}, which is {replica.state} and waits for no other replica"
            )
        self._notify_change()
        self._step_due.set()
        return name

    async def set_scale(
        self, model: str, min_replicas: int | None, max_replicas: int | None
    ) -> tuple[int, int]:
        """Change a deployment's bounds; None keeps one. Returns both.

        Raises:
            ModelNotFound: the model is not deployed.
            ConfigError: a bound is out of its range.
            InvalidRequest: its replicas have roles, with bounds of their own.
        """
        known = self._deployments.get(model)
        if known is None:
            raise ModelNotFound(f"model {model!r} is not deployed")
        if len(known.parts) > 1:
            raise InvalidRequest(
                "model", f"is {model}, whose replicas have roles; deploy it with other numbers"
            )
        limits = known.limits
        bounds = (
            limits.min_replicas if min_replicas is None else min_replicas,
            limits.max_replicas if max_replicas is None else max_replicas,
        )
        scaled = replace(limits, min_replicas=bounds[0], max_replicas=bounds[1])
        await self.deploy(replace(known, limits=scaled))
        return bounds

    def report(self, gateway_id: str, demand: Mapping[str, Demand]) -> None:
        """Add a gateway's demand since its last report; `demand` is model |-> Demand."""
        self._rests_until = -math.inf
        for name, count in demand.items():
            for (model, role), part in self._parts.items():
                if model == name:
                    part.demand.add(gateway_id, count.of_role(role), self._clock())
            if count.num_waiting and name in self._deployments:
                self._step_due.set()

    def state(self) -> FleetState:
        """Return the present state."""
        return FleetState(
            self._state_version(),
            tuple(self._entry(deployment) for deployment in self._deployments.values()),
            tuple(replica.entry() for replica in self._replicas.values()),
            self._nodes.nodes,
            self._gateways.ids,
        )

    async def watch(self, since: str, timeout_s: float) -> FleetState | None:
        """Return the state once its version differs from `since`, or None after `timeout_s` without a change."""
        return self.state() if await self._has_changed(since, timeout_s) else None

    async def follow(self, gateway_id: str, since: str, timeout_s: float) -> bytes | None:
        """Count the gateway among those that divide the replicas, and return `changes`."""
        with self._gateways.following(gateway_id):
            return await self.changes(since, timeout_s)

    async def changes(self, since: str, timeout_s: float) -> bytes | None:
        """Return the pickled FleetChanges once there are some, or None after `timeout_s` without a change.

        They are made and encoded once for all gateways that know the same version.
        """
        if not await self._has_changed(since, timeout_s):
            return None
        await asyncio.sleep(self._told_at + CHANGES_INTERVAL_S - self._clock())
        if self._logged_version != self._version:
            self._log.update(self._version, self.state())
            self._logged_version, self._encoded, self._told_at = self._version, {}, self._clock()
        if since not in self._encoded:
            epoch, _, number = since.partition("-")
            known = int(number) if epoch == self._epoch else 0
            self._encoded[since] = pickle.dumps(self._log.since(known, since))
        return self._encoded[since]

    def statuses(self) -> bytes:
        """Return the pickled messages of all replicas' latest statuses, made once per STATUSES_INTERVAL_S."""
        made_at, encoded = self._encoded_statuses
        if self._clock() - made_at >= STATUSES_INTERVAL_S:
            known = (each.status for each in self._replicas.values() if each.state not in _ENDED)
            encoded = pickle.dumps([encode(status) for status in known if status is not None])
            self._encoded_statuses = self._clock(), encoded
        return encoded

    async def _has_changed(self, since: str, timeout_s: float) -> bool:
        """Wait until the version differs from `since`; return False after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while since == self._state_version():
                    await self._changes.wait()
        return since != self._state_version()

    async def close(self) -> None:
        """Stop managing; replicas keep running."""
        replicas, self._replicas = list(self._replicas.values()), {}
        await asyncio.gather(*(replica.detach() for replica in replicas))
        self._blocking.close()

    def _state_version(self) -> str:
        return f"{self._epoch}-{self._version}"

    def _find(self, target: str) -> str:
        """Return the id of the only running replica or node whose id begins with the target."""
        running = [each.replica_id for each in self._replicas.values() if each.state not in _ENDED]
        nodes = [node.node_id for node in self._nodes.nodes]
        matching = [name for name in (*running, *nodes) if target and name.startswith(target)]
        if len(matching) != 1:
            which = f"matches {len(matching)} of" if matching else "is none of"
            raise InvalidRequest("target", f"is {target!r}, which {which} the replicas and nodes that run")
        return matching[0]

    def _set_deployment(self, deployment: Deployment) -> None:
        """Add or change a deployment: its parts keep their scaling state."""
        self._deployments[deployment.name] = deployment
        wanted = {_key_of(part): part for part in deployment.parts}
        for key in [key for key in self._parts if key[0] == deployment.name and key not in wanted]:
            del self._parts[key]
        for key, own in wanted.items():
            part = self._parts.get(key)
            if part is None:
                scaling = ScalingState()
                self._parts[key] = _Part(
                    own, scaling, Decision(own.limits.min_replicas, "min_replicas", scaling)
                )
                continue
            if part.deployment.version != own.version:
                part.backoff, part.problem = _launch_backoff(), ""
            part.deployment = own

    def _parts_of(self, name: str) -> list[_Part]:
        return [part for (model, _), part in self._parts.items() if model == name]

    def _has_all_roles(self, name: str) -> bool:
        """Return whether a replica is ready of each role that the model's replicas are to have."""
        return all(
            any(each.state is ReplicaState.READY for each in self._replicas_of(part))
            for part in self._parts_of(name)
        )

    def _entry(self, deployment: Deployment) -> DeploymentEntry:
        """Return a deployment as gateways and operators see it: the sum of its parts."""
        parts = self._parts_of(deployment.name)
        if len(parts) == 1:
            reason = parts[0].decision.reason
        else:
            reason = "; ".join(
                f"{part.decision.target} {part.deployment.engine.role}: {part.decision.reason}"
                for part in parts
            )
        problem = "; ".join(part.problem for part in parts if part.problem)
        return DeploymentEntry(deployment, sum(part.decision.target for part in parts), reason, problem)

    def _add_replica(self, replica_id: str, deployment: Deployment) -> ReplicaLifecycle:
        replica = self._replicas[replica_id] = ReplicaLifecycle(replica_id, deployment, self._context)
        self._notify_change()
        return replica

    def _replicas_of(self, part: _Part) -> list[ReplicaLifecycle]:
        key = _key_of(part.deployment)
        return [each for each in self._replicas.values() if (each.model, each.role) == key]

    async def _read_nodes(self) -> None:
        self._nodes_read_at, before = self._clock(), self._nodes.nodes
        nodes = await self._blocking.call("reading the nodes", self._launcher.nodes)
        self._nodes.update(nodes, {name for each in self._replicas.values() for name in each.node_ids})
        if nodes != before:
            self._notify_change()

    def _drain_departing_nodes(self) -> None:
        for replica in self._replicas.values():
            departure = self._nodes.departure_of(replica.node_ids)
            if departure is not None:  # the drain's grace period must end before the node does
                replica.require_drain(departure.deadline - replica.deployment.drain_grace_s, departure.reason)

    def _scale(self, part: _Part) -> None:
        """Set the part's target."""
        now = self._clock()
        replicas = [(each.state, each.status) for each in self._replicas_of(part)]
        snapshot = take_snapshot(now, replicas, part.demand)
        decision = decide(snapshot, part.deployment.limits, part.scaling)
        part.scaling = decision.state
        before, part.decision = part.decision, decision
        if decision.target != before.target:
            _log.info(
                "%s: the target is %d replicas: %s", part.deployment.name, decision.target, decision.reason
            )
        elif decision.reason == before.reason:
            return
        if decision.target != before.target or now - part.told_at >= REASON_INTERVAL_S:
            part.told_at = now
            self._notify_change()
        else:
            self._version += 1  # gateways learn of the reason with the next change

    def _reconcile(self, part: _Part) -> None:
        """Start, drain and stop replicas towards the target."""
        now, version = self._clock(), part.deployment.version
        replicas = self._replicas_of(part)
        actions = plan(part.decision.target, version, [each.view() for each in replicas], now)
        for replica in (self._replicas[name] for name in actions.stop):
            replica.stop(replica.drain_reason or "it is not needed any more")
        for replica in (self._replicas[name] for name in actions.drain):
            replica.drain(replica.drain_reason or _scale_down_reason(part, replica))
        if any(each.is_stable(now) and each.version == version for each in replicas):
            part.backoff.reset()
        peers = [
            each.replica_id
            for each in replicas
            if each.version == version and each.state is ReplicaState.READY
        ]
        for _ in range(self._num_starts_now(part, actions.num_starts)):
            self._add_replica(f"replica-{secrets.token_hex(4)}", part.deployment).launch(peers)

    def _num_starts_now(self, part: _Part, num_starts: int) -> int:
        """Return the starts that the backoff allows: after a failed start, one replica at a time."""
        if part.backoff.num_failures == 0:
            return num_starts
        replicas = self._replicas_of(part)
        is_starting = any(each.state is ReplicaState.STARTING for each in replicas)
        return 0 if is_starting or not part.backoff.is_due(self._clock()) else min(num_starts, 1)

    def _on_replica_state(self, replica: ReplicaLifecycle) -> None:
        part = self._parts.get((replica.model, replica.role))
        if part is not None and part.deployment.version == replica.version:
            if replica.state is ReplicaState.READY:
                self._on_replica_ready(part, replica)
            elif replica.state is ReplicaState.FAILED:
                self._on_replica_failed(part, replica)
        self._notify_change()
        self._step_due.set()

    def _on_replica_ready(self, part: _Part, replica: ReplicaLifecycle) -> None:
        part.problem = ""
        if not replica.is_adopted:  # an adoption is much faster than a cold start
            part.demand.cold_start_s = self._clock() - replica.started_at

    def _on_replica_failed(self, part: _Part, replica: ReplicaLifecycle) -> None:
        part.problem = f"{replica.replica_id}: {replica.reason}"
        # A replica that failed after it was stable is replaced without delay. Those that were launched before the
        # latest failure tell nothing new: a hundred that are lost together would make the delay the longest one.
        now = self._clock()
        if not replica.is_stable(now) and replica.started_at > part.failed_at:
            part.failed_at, delay_s = now, part.backoff.fail(now)
            _log.warning("%s: the next replica starts in %g s", part.deployment.name, delay_s)

    def _drop_ended(self) -> None:
        """Keep only the latest MAX_ENDED_REPLICAS ended replicas."""
        ended = [replica_id for replica_id, replica in self._replicas.items() if replica.has_ended]
        for replica_id in ended[:-MAX_ENDED_REPLICAS]:
            del self._replicas[replica_id]
            self._notify_change()

    def _notify_change(self) -> None:
        self._version, self._rests_until = self._version + 1, -math.inf
        self._changes.notify()


def _scale_down_reason(part: _Part, replica: ReplicaLifecycle) -> str:
    if replica.version != part.deployment.version:
        return f"version {part.deployment.version} replaces it"
    return f"the target is {part.decision.target} replicas: {part.decision.reason}"
