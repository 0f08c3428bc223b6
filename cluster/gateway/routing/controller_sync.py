"""ControllerSync: keeps a gateway's models in step with the fleet controller and reports demand to it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ....proto import admin_pb2
from ....proto.config import EngineConfig
from ....proto.errors import QuireError
from ....proto.replica_status import ReplicaStatus
from ....proto.transport.network import CurveKeys
from ...config.deployment import Deployment
from ...config.machine import LARGE_GPU_BYTES
from ...config.resolve import resolve_deployment
from ...fleet.controller.controller_client import Controller
from ...fleet.controller.fleet_state import (
    Demand,
    DeploymentEntry,
    FleetCommand,
    FleetState,
    NodeEntry,
    ReplicaEntry,
    ReplicaState,
)
from ...fleet.replica.client import SILENCE_MARGIN_S, ReplicaClient
from ...fleet.replica.record import ReplicaRecord
from ...fleet.routing.subset import SUBSET_SIZE, Subset
from ...os_utils.backoff import Backoff
from ...os_utils.event_loop import run_in_background
from ...text.requests.tokenizer import Tokenizer, load_tokenizer
from .replica_pool import ReplicaPool
from .served_models import ServedModel, ServedModels

WATCH_TIMEOUT_S = 30.0
REPORT_INTERVAL_S = 1.0
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 5.0

_ENDED = ReplicaState.STOPPED, ReplicaState.FAILED

_log = logging.getLogger(__name__)

_STATES = {
    ReplicaState.STARTING: admin_pb2.REPLICA_STATE_STARTING,
    ReplicaState.READY: admin_pb2.REPLICA_STATE_READY,
    ReplicaState.DRAINING: admin_pb2.REPLICA_STATE_DRAINING,
    ReplicaState.STOPPED: admin_pb2.REPLICA_STATE_STOPPED,
    ReplicaState.FAILED: admin_pb2.REPLICA_STATE_FAILED,
}


@dataclass(slots=True, eq=False)
class _SyncedModel:
    """A model that the controller deploys.

    Attributes:
        version: version of the deployment that `served` was read from.
        silence_timeout_s: silence after which a replica of that version counts as failed.
        is_logged: the log has a summary of that version.
        subsets: version |-> this gateway's choice among the replicas of that version.
        failed: replicas that this gateway could not use when it chose.
    """

    version: str
    served: ServedModel
    silence_timeout_s: float
    is_logged: bool = False
    subsets: dict[str, Subset] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()


class ControllerSync:
    """Applies each state of the controller to a gateway's models. They stay unchanged while the controller is away.

    Args:
        models: the gateway's models; this object adds and removes them.
        subset_size: replicas of a model and version that the gateway uses, on average; see Subset.
    """

    def __init__(
        self, controller: Controller, models: ServedModels, *, subset_size: int = SUBSET_SIZE
    ) -> None:
        self._subset_size = subset_size
        self._controller = controller
        self._models = models
        self._gateway_id = secrets.token_hex(8)
        self._keys: CurveKeys | None = None
        self._state = FleetState("")
        self._gateways: tuple[str, ...] | None = ()  # the latest that the controller knew
        self._chosen_from = self._state  # the state that the subsets are of
        self._synced: dict[str, _SyncedModel] = {}
        self._retired: list[ReplicaPool] = []  # of deleted models, while they have replicas
        self._problem = "the fleet's controller has not answered yet"
        self._report_due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow the controller. Call it in the gateway's event loop."""
        self._tasks = [
            run_in_background(self._watch_loop(), "following the controller"),
            run_in_background(self._report_loop(), "reporting to the controller"),
        ]

    async def close(self) -> None:
        """Stop following, and end what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._retired))
        await self._models.close()

    async def apply(self, command: FleetCommand) -> Mapping[str, Any]:
        return await self._controller.apply(command)

    def describe(self) -> admin_pb2.GetStatusResponse:
        return fleet_state_to_message(self._state, self._problem)

    async def statuses(self) -> list[ReplicaStatus]:
        """Return the latest statuses of the fleet's replicas. Raises ReplicaUnavailable without the controller."""
        return await self._controller.statuses()

    async def _watch_loop(self) -> None:
        """Apply every new state of the controller."""
        backoff = Backoff(FIRST_RETRY_S, MAX_RETRY_S)
        while True:
            try:
                self._keys = self._keys or await self._controller.keys()
                state = await self._controller.watch(self._gateway_id, self._state.version, WATCH_TIMEOUT_S)
                if state is not None:
                    await self._apply(state)
                    self._state = state
                    self._models.notify_change()
            except Exception as error:
                # On any error the gateway serves on with the last state, and tries again.
                self._on_sync_failed(error)
                await asyncio.sleep(backoff.fail(time.monotonic()))
                continue
            if self._problem and backoff.num_failures:
                _log.info("the fleet's controller answers again")
            self._problem = ""
            backoff.reset()

    def _on_sync_failed(self, error: Exception) -> None:
        is_unexpected = not isinstance(error, QuireError)
        problem = f"the gateway cannot apply the fleet's state: {error!r}" if is_unexpected else str(error)
        if problem != self._problem:
            traceback = error if is_unexpected else None
            _log.warning("the fleet's state is out of date: %s", problem, exc_info=traceback)
        self._problem = problem

    async def _apply(self, state: FleetState) -> None:
        _log_changes(self._state, state)
        for entry in state.deployments:
            await self._apply_deployment(entry.deployment, state)
        self._retire_deleted(state)
        for pool in [*(model.served.pool for model in self._synced.values()), *self._retired]:
            _remove_ended(pool, state)
            _drain_draining(pool, state)
        self._gateways = self._gateways if state.gateways == () else state.gateways
        self._chosen_from = state
        for model in self._synced.values():
            self._use_subset(model, state)
        for pool in [pool for pool in self._retired if not pool.clients]:
            await pool.close()
            self._retired.remove(pool)

    async def _apply_deployment(self, deployment: Deployment, state: FleetState) -> None:
        """Serve the deployment, or update the model that is served already."""
        reachable = [entry for entry in state.replicas_of(deployment.name) if entry.record is not None]
        model = self._synced.get(deployment.name)
        if model is None or _must_switch(model.version, deployment, reachable):
            try:
                config, tokenizer = await asyncio.to_thread(_read_model, deployment)
            except QuireError as error:
                _log.error("%s cannot be served by this gateway: %s", deployment.name, error)
                return
            pool = self._new_pool(config) if model is None else model.served.pool
            served = ServedModel.of(config, tokenizer, pool)
            served.start_workers()
            silence_timeout_s = config.scheduler.step_timeout_s + SILENCE_MARGIN_S
            model = self._synced[deployment.name] = _SyncedModel(
                deployment.version, served, silence_timeout_s
            )
            self._models.add(served)
        _limit_to_smallest_replica(model.served, reachable)
        model.served.scales_from_zero = deployment.min_replicas == 0
        self._models.notify_change()

    def _retire_deleted(self, state: FleetState) -> None:
        for name in sorted(set(self._synced) - {entry.deployment.name for entry in state.deployments}):
            pool = self._synced.pop(name).served.pool
            self._models.remove(name)
            pool.retire()
            self._retired.append(pool)

    def _new_pool(self, config: EngineConfig) -> ReplicaPool:
        name = config.model.name
        return ReplicaPool(
            name,
            config.cache.block_size,
            sees_whole_prompt=config.model.sees_whole_prompt,
            max_waiting=config.scheduler.max_queue_len,
            on_demand=self._report_due.set,
            on_change=self._models.notify_change,
            explain_unavailable=lambda: self._explain_unavailable(name),
        )

    def _use_subset(self, model: _SyncedModel, state: FleetState) -> None:
        """Add the replicas to use that have become ready, and part from those that others use instead.

        Not for deleted models: their pools get no more requests.
        """
        pool = model.served.pool
        model.failed = _failed(pool)
        entries = state.replicas_of(pool.model)
        records = {
            entry.replica_id: entry.record
            for entry in entries
            if entry.state is ReplicaState.READY and entry.record is not None
        }
        chosen = self._choose(model, entries, records)
        for replica_id, client in list(pool.clients.items()):
            record = records.get(replica_id)
            if record is not None and client.address != record.endpoint:
                pool.remove(replica_id, "its scheduler was replaced")
            elif record is not None and replica_id not in chosen:
                pool.leave(replica_id)
        # In the order of the state, not of a set's: a simulation of a seed runs equally in every process.
        for replica_id, record in records.items():
            if replica_id in chosen and replica_id in pool.clients:
                pool.stay(replica_id)
            elif replica_id in chosen:
                pool.add(self._connect(record, model.silence_timeout_s))
                _log_summary(model)
        pool.set_unused(
            {
                replica_id: partial(self._connect, record, model.silence_timeout_s)
                for replica_id, record in records.items()
                if replica_id not in chosen
            }
        )

    def _choose(
        self, model: _SyncedModel, entries: Sequence[ReplicaEntry], ready: Collection[str]
    ) -> set[str]:
        """Return the ready replicas to use: a subset of each version, and so of each role."""
        if self._gateways is None:
            return set(ready)
        by_version: dict[str, list[str]] = {}
        expected = Counter(entry.version for entry in entries if entry.state not in _ENDED)
        for entry in entries:
            if entry.replica_id in ready:
                by_version.setdefault(entry.version, []).append(entry.replica_id)
        model.subsets = {
            version: model.subsets.get(version) or Subset(self._gateway_id, self._subset_size)
            for version in by_version
        }
        chosen = set[str]()
        for version, replica_ids in by_version.items():
            subset = model.subsets[version]
            chosen |= subset.choose(self._gateways, replica_ids, model.failed, expected[version])
        return chosen

    def _replace_failed(self) -> None:
        """Use other replicas in place of those of the subset that this gateway cannot use."""
        for model in self._synced.values():
            if _failed(model.served.pool) != model.failed:
                self._use_subset(model, self._chosen_from)

    def _connect(self, record: ReplicaRecord, silence_timeout_s: float) -> ReplicaClient:
        client = ReplicaClient(
            record.endpoint, record.replica_id, silence_timeout_s=silence_timeout_s, keys=self._keys
        )
        client.start()
        return client

    def _explain_unavailable(self, name: str) -> str:
        """Return why the model has no replica, from the controller's last state."""
        lines = [
            f"{entry.replica_id} is {entry.state}{_in_parentheses(entry.reason)}"
            for entry in self._state.replicas_of(name)
            if entry.state is not ReplicaState.STOPPED
        ]
        lines += [entry.problem for entry in self._state.deployments if entry.deployment.name == name]
        lines.append(self._problem)
        return "; ".join(dict.fromkeys(filter(None, lines)))

    async def _report_loop(self) -> None:
        """Report demand every second in which there is any, and immediately when a request begins to wait.

        Replace what has failed in the subset every second, too: the controller may be away, or not notice.
        """
        last_reported: dict[str, Demand] = {}
        while True:
            collected = {model.name: model.pool.collect_demand() for model in self._models}
            # A model without demand is reported once more after requests waited for it: the controller must know.
            had_waiting = {name for name, demand in last_reported.items() if demand.num_waiting}
            report = {
                name: demand
                for name, demand in collected.items()
                if demand != Demand() or name in had_waiting
            }
            last_reported = collected
            if report:
                with suppress(QuireError):  # the next report has the requests that still wait
                    await self._controller.report(self._gateway_id, report)
            self._replace_failed()
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await self._report_due.wait()
            self._report_due.clear()


def _must_switch(served_version: str, deployment: Deployment, reachable: Iterable[ReplicaEntry]) -> bool:
    """Return whether to serve a new version: once a replica of it is ready, or if no replica is ready at all."""
    if served_version == deployment.version:
        return False
    ready_versions = {entry.version for entry in reachable if entry.state is ReplicaState.READY}
    return not ready_versions or any(part.version in ready_versions for part in deployment.parts)


def _limit_to_smallest_replica(served: ServedModel, reachable: Iterable[ReplicaEntry]) -> None:
    """Reject requests that do not fit into the smallest replica: a request may run on any of them.

    A deployment does not tell on which nodes its replicas run; their records do.
    """
    records = [entry.record for entry in reachable if entry.record is not None]
    if not records:
        return
    config, smallest = served.config, min(records, key=lambda record: record.num_kv_blocks)
    limited = replace(config, cache=replace(config.cache, num_kv_blocks=smallest.num_kv_blocks))
    if all(record.device for record in records):
        limited = replace(
            limited,
            model=replace(config.model, dtype=smallest.dtype),
            parallel=replace(config.parallel, device=smallest.device),
            scheduler=replace(
                config.scheduler,
                max_num_seqs=min(record.max_num_seqs for record in records),
                max_num_batched_tokens=min(record.max_num_batched_tokens for record in records),
            ),
        )
    if limited != config:
        served.resize(limited)


def _remove_ended(pool: ReplicaPool, state: FleetState) -> None:
    entries = {entry.replica_id: entry for entry in state.replicas_of(pool.model)}
    for replica_id in pool.clients:
        entry = entries.get(replica_id)
        if entry is None or entry.state in _ENDED:
            pool.remove(replica_id, (entry.reason if entry is not None else "") or "it was ended")


def _failed(pool: ReplicaPool) -> frozenset[str]:
    return frozenset(replica_id for replica_id, client in pool.clients.items() if client.has_failed)


def _drain_draining(pool: ReplicaPool, state: FleetState) -> None:
    for entry in state.replicas_of(pool.model):
        if entry.state is ReplicaState.DRAINING:
            pool.drain(entry.replica_id)


def _log_summary(model: _SyncedModel) -> None:
    """Log what is served, once per version: with its first replica, whose KV cache has a size."""
    if not model.is_logged:
        _log.info("serving version %s: %s", model.version, model.served.config.summary)
    model.is_logged = True


def _log_changes(before: FleetState, after: FleetState) -> None:
    """Log every replica whose state or reason changed."""
    known = {entry.replica_id: (entry.state, entry.reason) for entry in before.replicas}
    for entry in after.replicas:
        if known.get(entry.replica_id) != (entry.state, entry.reason):
            reason = f": {entry.reason}" if entry.reason else ""
            _log.info("%s of %s is %s%s", entry.replica_id, entry.model, entry.state, reason)


def _read_model(deployment: Deployment) -> tuple[EngineConfig, Tokenizer]:
    """Read config and tokenizer from the model's directory on this machine; the ranks may run elsewhere."""
    has_gpus = deployment.engine.device != "cpu"
    config = resolve_deployment(deployment, has_gpus, LARGE_GPU_BYTES)
    return config, load_tokenizer(config.model)


def _in_parentheses(text: str) -> str:
    return f" ({text})" if text else ""


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
    return admin_pb2.DeploymentStatus(
        model=entry.deployment.name,
        version=entry.deployment.version,
        min_replicas=entry.deployment.min_replicas,
        max_replicas=entry.deployment.max_replicas,
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
