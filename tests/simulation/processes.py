"""Simulated controllers and gateways: the real ones, on simulated time, without Ray and without models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

from benchmarks.in_memory import MemoryStore
from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.controller.controller_client import FollowedState, decode_statuses
from quire.cluster.fleet.controller.fleet import Fleet
from quire.cluster.fleet.controller.fleet_state import Demand, FleetCommand, FleetState
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.fleet.replica.record import ReplicaRecord
from quire.cluster.gateway.routing import controller_sync
from quire.cluster.gateway.routing.controller_sync import ControllerSync
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.cluster.gateway.routing.served_models import ServedModel, ServedModels
from quire.proto.config import EngineConfig
from quire.proto.errors import ReplicaUnavailable
from quire.proto.replica_status import ReplicaStatus

from .replicas import (
    MODEL,
    Cluster,
    SimulatedCalls,
    SimulatedLauncher,
    connect,
    replica_config,
    wall_clock,
)


def deployment(version: int, num_replicas: int) -> Deployment:
    """Return the deployment of the simulation's model."""
    return Deployment.from_table(
        {
            "model": MODEL,
            "drain_grace_s": 0.3,
            "step_timeout_s": 5.0,
            "min_replicas": num_replicas,
            "max_replicas": num_replicas,
            "weights_version": str(version),
        }
    )


class ControllerProcess:
    """A controller that can crash and start again.

    Attributes:
        fleet: None while it is down.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._runner: asyncio.Task[None] | None = None
        self.fleet: Fleet | None = None

    async def start(self) -> None:
        """Start, with the replicas and the deployments of an earlier controller."""
        fleet = Fleet(
            SimulatedLauncher(self._cluster),
            MemoryStore(self._cluster.texts),
            clock=asyncio.get_running_loop().time,
            wall_clock=wall_clock,
            canary_timeout_s=20.0,
            blocking=SimulatedCalls(self._cluster.rng),
        )
        await fleet.recover()
        self.fleet = fleet
        self._runner = asyncio.create_task(fleet.run())

    async def crash(self) -> None:
        """End at once. Does nothing while it is down."""
        fleet, self.fleet = self.fleet, None
        if fleet is not None and self._runner is not None:
            self._runner.cancel()
            await fleet.close()


class _Controller:
    """See `controller_client.Controller`: one gateway's connection to the controller."""

    def __init__(self, cluster: Cluster, gateway: str, process: ControllerProcess) -> None:
        self._network = cluster.network
        self._gateway = gateway
        self._process = process
        self._followed = FollowedState()

    async def keys(self) -> None:
        return None

    async def watch(self, gateway_id: str, since: str, timeout_s: float) -> FleetState | None:
        fleet = await self._reach()
        encoded = await fleet.follow(gateway_id, self._followed.known(since), min(timeout_s, 5.0))
        if self._process.fleet is not fleet:
            raise ReplicaUnavailable("the controller has ended")
        await self._network.call(self._gateway, "controller")
        return self._followed.receive(encoded)

    async def statuses(self) -> list[ReplicaStatus]:
        return decode_statuses((await self._reach()).statuses())

    async def report(self, gateway_id: str, demand: Mapping[str, Demand]) -> None:
        (await self._reach()).report(gateway_id, demand)

    async def apply(self, command: FleetCommand) -> Mapping[str, Any]:
        return await (await self._reach()).apply(command)

    async def _reach(self) -> Fleet:
        await self._network.call(self._gateway, "controller")
        if self._process.fleet is None:
            raise ReplicaUnavailable("the fleet's controller is away")
        return self._process.fleet


class _NoWorkers:
    """Stands for `TokenizerWorkers`: the simulation's prompts are token ids."""

    def start(self) -> None: ...
    def close(self) -> None: ...


class _Sync(ControllerSync):
    """A ControllerSync whose clients use the simulated network."""

    cluster: Cluster
    gateway: str

    def _connect(self, record: ReplicaRecord, silence_timeout_s: float) -> ReplicaClient:
        client = connect(self.cluster, self.gateway, record, silence_timeout_s)
        client.start()
        return client


class Gateway:
    """A gateway's models and its connection to the fleet. A new gateway takes the place of one that crashed.

    Attributes:
        is_up: it has not crashed.
        crashed: set when it crashes.
    """

    def __init__(self, cluster: Cluster, name: str, controller: ControllerProcess) -> None:
        self.name = name
        self.is_up = True
        self.crashed = asyncio.Event()
        self.models = ServedModels()
        self.started_at = asyncio.get_running_loop().time()
        self._sync = _Sync(_Controller(cluster, name, controller), self.models)
        self._sync.cluster, self._sync.gateway = cluster, name
        self._sync.start()

    @property
    def pool(self) -> ReplicaPool:
        """Raises ModelNotFound before the gateway has heard of the model."""
        return self.models.find(MODEL).pool

    async def crash(self) -> None:
        """End at once: connections break, and nothing is aborted in order."""
        self.is_up = False
        self.crashed.set()
        await self._sync.close()


@contextmanager
def without_models() -> Iterator[None]:
    """Let gateways read no model from a disk."""

    def read_model(deployment: Deployment) -> tuple[EngineConfig, None]:
        config = replica_config()
        return config, None

    def served_model(config: EngineConfig, tokenizer: None, pool: ReplicaPool) -> ServedModel:
        workers: dict[str, Any] = {
            each.name: _NoWorkers() for each in fields(ServedModel) if each.name.endswith("workers")
        }
        return ServedModel(config, tokenizer, None, pool, **workers)  # type: ignore[arg-type]

    with (
        patch.object(controller_sync, "_read_model", read_model),
        patch.object(ServedModel, "of", staticmethod(served_model)),
    ):
        yield
