"""A running Fleet without Ray: a fake launcher, a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fake_fleet import FakeLauncher

from benchmarks.in_memory import MemoryStore
from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.controller.fleet import Fleet
from quire.cluster.fleet.controller.fleet_state import ReplicaEntry, ReplicaState

TICK_S = 0.02
DEADLINE_S = 60.0


def deployment(**options: Any) -> Deployment:
    return Deployment.from_table({"model": "demo", "drain_grace_s": 0.2, **options})


class RunningFleet:
    """A running fleet."""

    def __init__(self, launcher: FakeLauncher, store: MemoryStore) -> None:
        self.launcher = launcher
        self.store = store
        self.fleet = Fleet(launcher, store, tick_s=TICK_S, canary_timeout_s=DEADLINE_S)

    def entries(self, *states: ReplicaState) -> list[ReplicaEntry]:
        return [entry for entry in self.fleet.state().replicas if not states or entry.state in states]

    def ready(self) -> list[ReplicaEntry]:
        return self.entries(ReplicaState.READY)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await self.fleet.watch(self.fleet.state().version, 0.05)

    async def serve(self, num_replicas: int = 1) -> list[ReplicaEntry]:
        """Deploy the model, and return its replicas once so many are ready."""
        limits = {"min_replicas": num_replicas, "max_replicas": num_replicas} if num_replicas > 1 else {}
        await self.fleet.deploy(deployment(**limits))
        await self.until_ready(num_replicas)
        return self.ready()

    async def until_ready(self, num_replicas: int, version: str | None = None) -> None:
        await self.until(
            lambda: (
                len(self.ready()) == num_replicas
                and not self.entries(ReplicaState.STARTING, ReplicaState.DRAINING)
                and all(version in (None, entry.version) for entry in self.ready())
            )
        )


@asynccontextmanager
async def running(launcher: FakeLauncher, store: MemoryStore | None = None) -> AsyncIterator[RunningFleet]:
    fleet = RunningFleet(launcher, store or MemoryStore())
    await fleet.fleet.recover()
    runner = asyncio.create_task(fleet.fleet.run())
    try:
        yield fleet
    finally:
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
        await fleet.fleet.close()
