"""ControllerSync: how a gateway learns of the fleet, tells it what waits, and passes on what operators want."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ...proto import admin_pb2
from ...proto.config import EngineConfig
from ...proto.errors import QuireError
from ...proto.transport.network import CurveKeys
from ..config.deployment import Deployment
from ..controller_api.controller_client import Controller
from ..controller_api.demand import Demand
from ..controller_api.fleet_state import DeploymentEntry, FleetState, ReplicaEntry, ReplicaState
from ..host.background import run_in_background
from ..host.backoff import Backoff
from ..replica.client import PATIENCE_S, ReplicaClient
from ..replica.replica import ReplicaRecord
from ..requests.request import RequestChecker
from ..requests.tokenizer import Tokenizer
from .replica_pool import ReplicaPool
from .served_models import ServedModel, ServedModels

WATCH_S = 30.0
REPORT_S = 1.0
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Model:
    """A model as this gateway serves it now."""

    version: str
    served: ServedModel
    patience_s: float


class ControllerSync:
    """Keeps a gateway's models as the controller has them; while it is away, as they were last.

    Args:
        models: what the gateway serves; this fills it.
    """

    def __init__(self, controller: Controller, models: ServedModels) -> None:
        self._controller = controller
        self._models = models
        self._gateway_id = secrets.token_hex(8)
        self._keys: CurveKeys | None = None
        self._table = FleetState("")
        self._linked: dict[str, _Model] = {}
        self._retired: list[ReplicaPool] = []
        self._problem = "the fleet's controller has not answered yet"
        self._must_report = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to follow the controller. Call it in the gateway's event loop."""
        self._tasks = [
            run_in_background(self._follow(), "following the controller"),
            run_in_background(self._report(), "reporting to the controller"),
        ]

    async def close(self) -> None:
        """Ends what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._retired))
        await self._models.close()

    async def deploy(self, deployment: Deployment) -> None:
        """See `admin.Fleet`."""
        await self._controller.deploy(deployment)

    async def delete(self, model: str) -> None:
        """See `admin.Fleet`."""
        await self._controller.delete(model)

    async def drain(self, target: str) -> Sequence[str]:
        """See `admin.Fleet`."""
        return await self._controller.drain(target)

    def describe(self) -> admin_pb2.GetStatusResponse:
        """See `admin.Fleet`."""
        table = self._table
        return admin_pb2.GetStatusResponse(
            replicas=map(_replica_to_message, table.replicas),
            deployments=map(_deployment_to_message, table.deployments),
            nodes=[
                admin_pb2.Node(
                    node_id=node.node_id,
                    address=node.address,
                    draining=node.is_draining,
                    resources=dict(node.resources),
                )
                for node in table.nodes
            ],
            problem=self._problem,
        )

    async def _follow(self) -> None:
        """Takes over every table that the controller gives out."""
        backoff = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S)
        while True:
            try:
                self._keys = self._keys or await self._controller.keys()
                table = await self._controller.watch(self._table.version, WATCH_S)
                if table is not None:
                    await self._apply(table)
                    self._table = table
            except Exception as error:
                # Whatever it is, the gateway serves on with what it knows, and has another try at the rest.
                self._note_problem(error)
                await asyncio.sleep(backoff.fail(time.monotonic()))
                continue
            if self._problem and backoff.num_failures:
                _log.info("the fleet's controller answers again")
            self._problem = ""
            backoff.reset()

    def _note_problem(self, error: Exception) -> None:
        problem = str(error) if isinstance(error, QuireError) else f"the gateway cannot follow it: {error!r}"
        if problem != self._problem:
            fault = None if isinstance(error, QuireError) else error
            _log.warning("the fleet is as it was last seen: %s", problem, exc_info=fault)
        self._problem = problem

    async def _apply(self, table: FleetState) -> None:
        _log_changes(self._table, table)
        for entry in table.deployments:
            await self._apply_deployment(entry, _reachable(table, entry.deployment.name))
        for name in set(self._linked) - {entry.deployment.name for entry in table.deployments}:
            pool = self._linked.pop(name).served.pool
            self._models.remove(name)
            pool.retire()
            self._retired.append(pool)
        pools = [*(model.served.pool for model in self._linked.values()), *self._retired]
        for pool in pools:
            self._take_away(pool, table)
        for model in self._linked.values():
            self._add_ready(model, table)
        for pool in [pool for pool in self._retired if not pool.clients]:
            self._retired.remove(pool)
            await pool.close()

    async def _apply_deployment(self, entry: DeploymentEntry, reachable: Sequence[ReplicaEntry]) -> None:
        """The model as it is to be served from now on. A new version is, once a replica of it is ready."""
        deployment = entry.deployment
        known = self._linked.get(deployment.name)
        ready = {each.version for each in reachable if each.state is ReplicaState.READY}
        if known is None or (
            known.version != deployment.version and (deployment.version in ready or not ready)
        ):
            try:
                config, tokenizer = await asyncio.to_thread(_read, deployment)
            except QuireError as error:
                _log.error("%s cannot be served by this gateway: %s", deployment.name, error)
                return
            pool = self._new_pool(config) if known is None else known.served.pool
            served = ServedModel(config, tokenizer, RequestChecker(config, tokenizer), pool)
            known = self._linked[deployment.name] = _Model(
                deployment.version, served, config.scheduler.step_timeout_s + PATIENCE_S
            )
            self._models.add(served)
        self._bound(known, reachable)
        known.served.scales_from_zero = deployment.limits.min_replicas == 0
        self._models.notify_change()

    def _bound(self, known: _Model, reachable: Sequence[ReplicaEntry]) -> None:
        """What the smallest replica cannot hold is refused here."""
        sizes = [each.record.num_kv_blocks for each in reachable if each.record is not None]
        config = known.served.config
        if sizes and config.cache.num_blocks != min(sizes):
            config = replace(config, cache=replace(config.cache, num_blocks=min(sizes)))
            known.served.config = config
            known.served.checker = RequestChecker(config, known.served.tokenizer)

    def _new_pool(self, config: EngineConfig) -> ReplicaPool:
        name = config.model.name
        return ReplicaPool(
            name,
            config.cache.block_size,
            is_fixed=False,
            max_waiting=config.scheduler.max_queue_len,
            on_demand=self._must_report.set,
            on_change=self._models.notify_change,
            explain=lambda: self._why_none(name),
        )

    def _take_away(self, pool: ReplicaPool, table: FleetState) -> None:
        """The pool is left by what has ended, and gives nothing more to what drains."""
        entries = _entries(table, pool.model)
        for replica_id in pool.clients:
            entry = entries.get(replica_id)
            if entry is None or entry.state in (ReplicaState.STOPPED, ReplicaState.FAILED):
                pool.remove(replica_id, "it was ended" if entry is None else entry.reason or "it was ended")
            elif entry.state is ReplicaState.DRAINING:
                pool.drain(replica_id)

    def _add_ready(self, model: _Model, table: FleetState) -> None:
        """Replicas whose canary has passed. Those of a model that is served no longer are of no use."""
        pool = model.served.pool
        for entry in _entries(table, pool.model).values():
            is_new = entry.replica_id not in pool.clients
            if is_new and entry.state is ReplicaState.READY and entry.record is not None:
                pool.add(self._client(entry.record, model.patience_s))

    def _client(self, record: ReplicaRecord, patience_s: float) -> ReplicaClient:
        client = ReplicaClient(record.endpoint, record.replica_id, patience_s=patience_s, keys=self._keys)
        client.start()
        return client

    def _why_none(self, name: str) -> str:
        """Why the model has no replica now, in the controller's words."""
        lines = [
            f"{entry.replica_id} is {entry.state}{f' ({entry.reason})' if entry.reason else ''}"
            for entry in self._table.replicas
            if entry.model == name and entry.state is not ReplicaState.STOPPED
        ]
        lines += [
            each.problem for each in self._table.deployments if each.deployment.name == name and each.problem
        ]
        return "; ".join(dict.fromkeys([*lines, *([self._problem] if self._problem else [])]))

    async def _report(self) -> None:
        """Tells the controller what comes, each second in which something does; at once where something waits."""
        told: dict[str, Demand] = {}
        while True:
            counts = {model.name: model.pool.take_demand() for model in self._models}
            # That nothing waits any more is news, too.
            waited = {name for name, demand in told.items() if demand.num_waiting}
            demand = {name: count for name, count in counts.items() if count != Demand() or name in waited}
            told = counts
            if demand:
                with suppress(QuireError):  # what is lost is made up for by what waits
                    await self._controller.report(self._gateway_id, demand)
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._must_report.wait()
            self._must_report.clear()


def _log_changes(before: FleetState, after: FleetState) -> None:
    """What an operator at this gateway wants to read in its log."""
    known = {entry.replica_id: (entry.state, entry.reason) for entry in before.replicas}
    for entry in after.replicas:
        if known.get(entry.replica_id) != (entry.state, entry.reason):
            why = f": {entry.reason}" if entry.reason else ""
            _log.info("%s of %s is %s%s", entry.replica_id, entry.model, entry.state, why)


def _read(deployment: Deployment) -> tuple[EngineConfig, Tokenizer]:
    """What a gateway needs of a model, from its directory on this machine; its ranks run elsewhere."""
    config = deployment.resolve(has_gpus=deployment.engine.device == "cuda")
    return config, Tokenizer(config.model.path)


def _entries(table: FleetState, model: str) -> dict[str, ReplicaEntry]:
    return {entry.replica_id: entry for entry in table.replicas if entry.model == model}


def _reachable(table: FleetState, model: str) -> list[ReplicaEntry]:
    return [entry for entry in table.replicas if entry.model == model and entry.record is not None]


_STATES = {
    ReplicaState.STARTING: admin_pb2.REPLICA_STATE_STARTING,
    ReplicaState.READY: admin_pb2.REPLICA_STATE_READY,
    ReplicaState.DRAINING: admin_pb2.REPLICA_STATE_DRAINING,
    ReplicaState.STOPPED: admin_pb2.REPLICA_STATE_STOPPED,
    ReplicaState.FAILED: admin_pb2.REPLICA_STATE_FAILED,
}


def _replica_to_message(entry: ReplicaEntry) -> admin_pb2.Replica:
    return admin_pb2.Replica(
        replica_id=entry.replica_id,
        model=entry.model,
        state=_STATES[entry.state],
        version=entry.version,
        problem=entry.reason,
        node_ids=() if entry.record is None else entry.record.node_ids,
    )


def _deployment_to_message(entry: DeploymentEntry) -> admin_pb2.Deployment:
    limits = entry.deployment.limits
    return admin_pb2.Deployment(
        model=entry.deployment.name,
        version=entry.deployment.version,
        min_replicas=limits.min_replicas,
        max_replicas=limits.max_replicas,
        target_replicas=entry.target,
        reason=entry.reason,
        problem=entry.problem,
    )
