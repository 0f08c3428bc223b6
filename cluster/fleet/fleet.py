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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ...proto.errors import InvalidRequest, ModelNotFound, QuireError, ReplicaUnavailable
from ...proto.stream import Drain, ReplicaStatus
from ..replica import ReplicaRecord
from ..replica_client import ReplicaClient
from .autoscaler import Decision, ScalingState, decide
from .canary import run_canary
from .demand import Demand
from .deployment import Deployment
from .nodes import LEAVE_PATIENCE_S, NodeWatch
from .reconcile import Backoff, ReplicaState, Standing, plan
from .seams import Launcher, LiveReplica, Store
from .snapshot import DemandBook, observe
from .table import DeploymentEntry, FleetTable, ReplicaEntry

TICK_S = 1.0
# How often the cluster's nodes are looked at.
NODES_S = 3.0
CANARY_TIMEOUT_S = 120.0
# Starts and ends that run at once.
MAX_THREADS = 32
# Beyond its grace, before a draining replica is ended with what it still has.
DRAIN_SLACK_S = 10.0
# Beyond a step's own deadline, before a silent scheduler is given up.
PATIENCE_S = 5.0
# Ended replicas that are still told of: an operator reads why they failed.
MAX_ENDED_TOLD = 20
# After so long without a failure, a replica is proof that its version can run.
PROVEN_AFTER_S = 60.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica on its way from STARTING to STOPPED or FAILED."""

    replica_id: str
    deployment: Deployment
    since: float
    state: ReplicaState = ReplicaState.STARTING
    reason: str = ""
    no_room_since: float | None = None
    leave_by: float | None = None
    ready_at: float | None = None
    live: LiveReplica | None = None
    client: ReplicaClient | None = None
    task: asyncio.Task[None] | None = None
    must_drain: asyncio.Event = field(default_factory=asyncio.Event)
    drain_reason: str = ""

    @property
    def status(self) -> ReplicaStatus | None:
        return None if self.client is None else self.client.latest

    @property
    def node_ids(self) -> tuple[str, ...]:
        return () if self.live is None else self.live.record.node_ids

    def is_proven(self, now: float) -> bool:
        """It has served for a while: its version can run here."""
        return self.ready_at is not None and now - self.ready_at >= PROVEN_AFTER_S

    def standing(self) -> Standing:
        status = self.status
        return Standing(
            self.replica_id,
            self.deployment.version,
            self.state,
            self.since,
            0 if status is None else status.num_running + status.num_waiting,
            self.leave_by,
            self.no_room_since,
        )

    def entry(self) -> ReplicaEntry:
        return ReplicaEntry(
            self.replica_id,
            self.deployment.name,
            self.deployment.version,
            self.state,
            self.reason,
            None if self.live is None else self.live.record,
        )


@dataclass(slots=True)
class _Model:
    """A deployment and how it goes."""

    deployment: Deployment
    scaling: ScalingState
    decision: Decision
    backoff: Backoff = field(default_factory=Backoff)
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
        self._store = store
        self._clock = clock
        self._tick_s = tick_s
        self._canary_timeout_s = canary_timeout_s
        self._threads = ThreadPoolExecutor(MAX_THREADS, "fleet")
        self._models: dict[str, _Model] = {}
        self._replicas: dict[str, _Replica] = {}
        self._nodes_seen_at = -math.inf
        self._epoch, self._version = secrets.token_hex(4), 0
        self._changed = asyncio.Event()
        self._due = asyncio.Event()
        self._nodes = NodeWatch(launcher, clock, wall_clock, on_leave=self._due.set)

    async def recover(self) -> None:
        """Takes over what an earlier controller left: its deployments, its replicas that live, and nothing else."""
        memory = await self._in_thread(self._store.read)
        records = []
        for name, text in memory.items():
            kind, _, _ = name.partition("/")
            try:
                if kind == "deployment":
                    self._add_model(Deployment.from_json(text))
                elif kind == "replica":
                    made_for, _, record = text.partition("\n")
                    records.append((Deployment.from_json(made_for), ReplicaRecord.from_json(record)))
            except QuireError as error:
                _log.error("%s cannot be read, and is left out: %s", name, error)
        for deployment, found in records:
            replica = _Replica(found.replica_id, deployment, self._clock(), reason="is adopted")
            self._begin(replica, partial(self._launcher.adopt, found))
        for replica_id in await self._in_thread(self._launcher.known) - set(self._replicas):
            _log.warning("%s was left half started, and is ended", replica_id)
            await self._in_thread(self._launcher.remove, replica_id)
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
        self._leave_nodes()
        for model in list(self._models.values()):
            self._scale(model)
            self._reconcile(model)
        for replica in list(self._replicas.values()):
            if replica.deployment.name not in self._models and replica.state is not ReplicaState.DRAINING:
                self._drain(replica, "its model is served no longer")

    async def deploy(self, deployment: Deployment) -> None:
        """Serves a model, or serves it otherwise from now on."""
        await self._in_thread(self._store.write, f"deployment/{deployment.name}", deployment.to_json())
        model = self._models.get(deployment.name)
        if model is None:
            self._add_model(deployment)
        else:
            if model.deployment.version != deployment.version:
                model.backoff, model.problem = Backoff(), ""
            model.deployment = deployment
        self._note_change()
        self._due.set()

    async def delete(self, name: str) -> None:
        """Serves a model no longer; its replicas drain, with nowhere to move their requests to.

        Raises:
            ModelNotFound: it is not deployed.
        """
        if name not in self._models:
            raise ModelNotFound(f"model {name!r} is not deployed")
        await self._in_thread(self._store.delete, f"deployment/{name}")
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
        found = [name for name in (*self._running_ids(), *nodes) if target and name.startswith(target)]
        if len(found) != 1:
            what = f"fits {len(found)} of" if found else "is none of"
            raise InvalidRequest("target", f"is {target!r}, which {what} the replicas and nodes that run")
        (name,) = found
        if name in self._replicas:
            leaving = [self._replicas[name]]
            leaving[0].leave_by = self._clock() + LEAVE_PATIENCE_S
            leaving[0].drain_reason = "an operator drains it"
        else:
            await self._in_thread(self._launcher.cordon, name)
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

    def table(self) -> FleetTable:
        """What there is to tell now."""
        return FleetTable(
            f"{self._epoch}-{self._version}",
            tuple(
                DeploymentEntry(model.deployment, model.decision.target, model.decision.reason, model.problem)
                for model in self._models.values()
            ),
            tuple(replica.entry() for replica in self._replicas.values()),
            self._nodes.nodes,
        )

    async def watch(self, since: str, timeout_s: float) -> FleetTable | None:
        """The table, once it differs from the version that the caller has; None: it has not in that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while since == f"{self._epoch}-{self._version}":
                    await self._changed.wait()
                return self.table()
        return None

    async def close(self) -> None:
        """Forgets everything, and leaves the replicas as they are."""
        replicas, self._replicas = list(self._replicas.values()), {}
        tasks = [replica.task for replica in replicas if replica.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _add_model(self, deployment: Deployment) -> None:
        scaling = ScalingState()
        first = Decision(deployment.limits.min_replicas, "the least that is asked for", scaling)
        self._models[deployment.name] = _Model(deployment, scaling, first)

    def _running_ids(self) -> list[str]:
        ended = ReplicaState.STOPPED, ReplicaState.FAILED
        return [each.replica_id for each in self._replicas.values() if each.state not in ended]

    def _replicas_of(self, name: str) -> list[_Replica]:
        return [each for each in self._replicas.values() if each.deployment.name == name]

    async def _look_at_nodes(self) -> None:
        self._nodes_seen_at, before = self._clock(), self._nodes.nodes
        nodes = await self._in_thread(self._launcher.nodes)
        self._nodes.update(nodes, {name for each in self._replicas.values() for name in each.node_ids})
        if nodes != before:
            self._note_change()

    def _leave_nodes(self) -> None:
        """What runs on a node that will be gone drains while the node is still there."""
        for replica in self._replicas.values():
            leave = self._nodes.leave_of(replica.node_ids)
            if leave is not None and replica.leave_by is None:
                replica.leave_by = leave.by - replica.deployment.drain_grace_s
                replica.drain_reason = leave.reason

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
        now, name = self._clock(), model.deployment.name
        replicas = self._replicas_of(name)
        todo = plan(model.decision.target, model.deployment.version, [r.standing() for r in replicas], now)
        for replica_id in todo.stop:
            self._stop(self._replicas[replica_id], "it is not needed any more")
        for replica_id in todo.drain:
            replica = self._replicas[replica_id]
            self._drain(replica, replica.drain_reason or self._why_drained(model, replica))
        if any(r.is_proven(now) and r.deployment.version == model.deployment.version for r in replicas):
            model.backoff.succeed()
        # After a failure, one tries whether it goes now.
        num_starts = todo.num_starts if model.backoff.num_failures == 0 else min(todo.num_starts, 1)
        if model.backoff.num_failures and any(r.state is ReplicaState.STARTING for r in replicas):
            num_starts = 0
        if num_starts and model.backoff.may_start(now):
            for _ in range(num_starts):
                self._start(model.deployment)

    def _why_drained(self, model: _Model, replica: _Replica) -> str:
        if replica.deployment.version != model.deployment.version:
            return f"version {model.deployment.version} takes over"
        return f"{model.decision.target} replicas are enough: {model.decision.reason}"

    def _start(self, deployment: Deployment) -> None:
        replica = _Replica(f"replica-{secrets.token_hex(4)}", deployment, self._clock())

        def tell(line: str) -> None:
            loop.call_soon_threadsafe(self._take_word, replica, line)

        loop = asyncio.get_running_loop()
        self._begin(replica, lambda: self._launcher.launch(deployment, replica.replica_id, tell))

    def _begin(self, replica: _Replica, make: Callable[[], LiveReplica]) -> None:
        self._replicas[replica.replica_id] = replica
        replica.task = asyncio.create_task(self._live(replica, make))
        self._note_change()

    def _take_word(self, replica: _Replica, line: str) -> None:
        """What a launch says of itself."""
        if replica.state is not ReplicaState.STARTING:
            return
        _log.info("%s", line)
        waits = "waits for room" in line
        if not waits:
            replica.no_room_since = None
        elif replica.no_room_since is None:
            replica.no_room_since = self._clock()
        replica.reason = line.removeprefix(replica.replica_id).strip()
        self._note_change()

    async def _live(self, replica: _Replica, make: Callable[[], LiveReplica]) -> None:
        """A replica's whole life."""
        try:
            replica.live = await self._in_thread(make)
            record = replica.live.record
            memory = f"{replica.deployment.to_json()}\n{record.to_json()}"
            await self._in_thread(self._store.write, f"replica/{replica.replica_id}", memory)
            patience_s = replica.deployment.engine.step_timeout_s + PATIENCE_S
            replica.client = self._launcher.connect(record, patience_s)
            replica.client.start()
            replica.client.watch(replica.live.failure)
            if not await self._is_draining_already(replica):
                await self._prove(replica)
                self._set_state(replica, ReplicaState.READY, "")
                self._note_success(replica)
                await self._until_drained_or_failed(replica)
            await self._empty(replica)
        except QuireError as error:
            self._fail(replica, error)
        except Exception as error:
            _log.exception("%s failed", replica.replica_id)
            self._fail(replica, ReplicaUnavailable(f"its upkeep failed: {error!r}"))
        except asyncio.CancelledError:
            if replica.replica_id not in self._replicas:  # the controller itself ends; the replica lives on
                raise
        finally:
            if replica.client is not None:
                await replica.client.close()
        await self._end(replica)

    async def _is_draining_already(self, replica: _Replica) -> bool:
        """An adopted replica may have been draining when its controller died."""
        assert replica.client is not None
        status = await replica.client.status(self._canary_timeout_s)
        if status.draining:
            self._set_state(replica, ReplicaState.DRAINING, "it drained already when it was adopted")
        return status.draining

    async def _prove(self, replica: _Replica) -> None:
        """The canary, unless the replica fails first."""
        assert replica.client is not None
        self._take_word(replica, f"{replica.replica_id} waits for its first token")
        await run_canary(replica.client, self._canary_timeout_s)

    def _note_success(self, replica: _Replica) -> None:
        replica.ready_at = self._clock()
        model = self._models.get(replica.deployment.name)
        if model is not None and model.deployment.version == replica.deployment.version:
            model.problem = ""
            model.demand.cold_start_s = self._clock() - replica.since
            self._note_change()

    async def _until_drained_or_failed(self, replica: _Replica) -> None:
        """Returns once it is to drain. Raises ReplicaUnavailable once it has failed."""
        assert replica.client is not None
        failed = asyncio.ensure_future(replica.client.wait_until_failed())
        drained = asyncio.ensure_future(replica.must_drain.wait())
        try:
            await asyncio.wait((failed, drained), return_when=asyncio.FIRST_COMPLETED)
            if not drained.done():
                raise ReplicaUnavailable(failed.result())
        finally:
            failed.cancel()
            drained.cancel()

    async def _empty(self, replica: _Replica) -> None:
        """Drains the replica: returns once it has no requests, or kept them too long."""
        assert replica.client is not None
        client, grace_s = replica.client, replica.deployment.drain_grace_s
        client.send(Drain(grace_s))
        deadline = self._clock() + grace_s + DRAIN_SLACK_S
        with suppress(ReplicaUnavailable):  # it is gone: then it has no requests either
            while self._clock() < deadline:
                status = await client.status(DRAIN_SLACK_S)
                if status.num_running + status.num_waiting == 0:
                    return
                await client.next_status(DRAIN_SLACK_S)

    def _drain(self, replica: _Replica, reason: str) -> None:
        if replica.state is ReplicaState.READY:
            self._set_state(replica, ReplicaState.DRAINING, reason)
            replica.must_drain.set()
        else:
            self._stop(replica, reason)

    def _stop(self, replica: _Replica, reason: str) -> None:
        """Ends a replica that has not come to serve."""
        if replica.task is not None and replica.state is ReplicaState.STARTING:
            self._set_state(replica, ReplicaState.DRAINING, reason)
            replica.task.cancel()

    def _fail(self, replica: _Replica, error: QuireError) -> None:
        now = self._clock()
        self._set_state(replica, ReplicaState.FAILED, str(error))
        model = self._models.get(replica.deployment.name)
        if model is None or model.deployment.version != replica.deployment.version:
            return
        # One that served for a while and then died is replaced at once.
        if not replica.is_proven(now):
            wait_s = model.backoff.fail(now)
            _log.warning("%s: the next start is in %g s", model.deployment.name, wait_s)
        model.problem = f"{replica.replica_id}: {error}"

    async def _end(self, replica: _Replica) -> None:
        """Ends what is left of its processes."""
        try:
            if replica.live is not None:
                await self._in_thread(replica.live.close)
            await self._in_thread(self._launcher.remove, replica.replica_id)
            await self._in_thread(self._store.delete, f"replica/{replica.replica_id}")
        except Exception:
            _log.exception("%s could not be ended; the next controller tries again", replica.replica_id)
        if replica.state is not ReplicaState.FAILED:
            self._set_state(replica, ReplicaState.STOPPED, replica.reason)
        ended = [each for each in self._replicas.values() if each.replica_id not in self._running_ids()]
        for old in ended[: -MAX_ENDED_TOLD or None]:
            del self._replicas[old.replica_id]
        self._note_change()
        self._due.set()

    def _set_state(self, replica: _Replica, state: ReplicaState, reason: str) -> None:
        if state is not replica.state:
            level = logging.WARNING if state is ReplicaState.FAILED else logging.INFO
            _log.log(level, "%s is %s%s", replica.replica_id, state, f": {reason}" if reason else "")
        replica.state, replica.reason = state, reason
        self._note_change()
        self._due.set()

    def _note_change(self) -> None:
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
