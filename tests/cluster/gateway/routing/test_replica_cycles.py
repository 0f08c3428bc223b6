"""Replicas that come and go leave nothing behind in a gateway: memory, tasks, threads, descriptors, metrics."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from fake_fleet import FakeLauncher
from local_server import LocalGateway, local_config, local_gateway

from quire import SamplingParams
from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.generation.generation import GenerationCall
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.cluster.text.requests.outputs import CompletionFinished
from quire.proto.stream import Drain

DEADLINE_S = 60.0
# Cycles until every cache and every counter has its size.
NUM_WARM_UP = 5
# A leak costs one per cycle. A pool may start another thread when the machine is busy, and a scrape a connection.
MAX_GROWTH = 4
# A replica that stays would cost 30 KB. Windows of recent figures grow with the time, by 300 bytes per cycle.
MAX_BYTES_PER_CYCLE = 1000
# Larger blocks are tables of the interpreter: that of interned strings doubles at once, from 3.8 MB.
LARGE_BYTES = 1 << 20
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def no_log_records() -> Iterator[None]:
    """pytest keeps the records of a test's logs: each cycle has a warning, 1 KB of the memory that is measured."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@dataclass(frozen=True, slots=True)
class Held:
    """Things that a gateway holds.

    Attributes:
        num_bytes: of Python's objects, if they are traced, without large blocks.
        num_large_blocks: of at least LARGE_BYTES.
    """

    num_bytes: int
    num_large_blocks: int
    num_clients: int
    num_tasks: int
    num_threads: int
    num_descriptors: int
    num_metric_lines: int


class Cycles:
    """A gateway whose only replica is replaced again and again."""

    def __init__(self, gateway: LocalGateway, launcher: FakeLauncher, first: ReplicaClient) -> None:
        (self._model,) = gateway.services.models
        self._pool: ReplicaPool = self._model.pool
        self._gateway = gateway
        self._launcher = launcher
        self._present = first
        self._numbers = itertools.count(1)

    async def run(self, count: int) -> None:
        for _ in range(count):
            await self._replace()

    async def _replace(self) -> None:
        """Start a replica, drain the present one under a request, and remove it."""
        client = connect(self._launcher, f"replica-{next(self._numbers)}")
        client.start()
        before, self._present = self._present, client
        prompt = np.arange(2, 40).tolist()
        async with self._gateway.services.generation.run(GenerationCall(prompt, PARAMS)) as generation:
            await anext(generation.numbered_events)
            before.send(Drain(0.0))
            self._pool.add(client)
            events = [event async for event in generation.events]
        assert any(isinstance(event, CompletionFinished) for event in events)
        while self._pool.why_unavailable(client.replica_id):
            await asyncio.sleep(0.002)
        self._pool.remove(before.replica_id, "it was replaced")
        self._launcher.remove(before.replica_id)
        self._launcher.launched.pop(before.replica_id)
        self._launcher.removed.clear()

    async def held_after(self, before: Held) -> Held:
        """Return what is held once nothing has grown, or at the deadline: closed things end a moment later."""
        deadline = time.monotonic() + DEADLINE_S
        while growth(before, held := await self.held()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return held

    async def held(self) -> Held:
        assert self._gateway.http is not None
        async with httpx.AsyncClient(base_url=self._gateway.http.url, timeout=DEADLINE_S) as http:
            metrics = (await http.get("/metrics")).text
        async with asyncio.timeout(DEADLINE_S):
            while len(self._pool.clients) > 1 or self._pool._closing:
                await asyncio.sleep(0.01)
        gc.collect()
        clients = [each for each in gc.get_objects() if isinstance(each, ReplicaClient)]
        sizes = traced_sizes()
        num_bytes = sum(size for size in sizes if size < LARGE_BYTES)
        num_large = sum(size >= LARGE_BYTES for size in sizes)
        process = psutil.Process()
        threads, descriptors = threading.active_count(), process.num_fds()
        tasks = len(asyncio.all_tasks())
        return Held(
            num_bytes, num_large, len(clients), tasks, threads, descriptors, len(metrics.splitlines())
        )


def traced_sizes() -> list[int]:
    """Return the sizes of the blocks that tracemalloc knows; none if it does not trace."""
    return [each.size for each in tracemalloc.take_snapshot().traces] if tracemalloc.is_tracing() else []


def growth(before: Held, after: Held) -> dict[str, int]:
    """Return the counts that have grown: name |-> by how much."""
    allowed = {
        "num_large_blocks": MAX_GROWTH,
        "num_clients": 0,
        "num_tasks": 0,
        "num_threads": MAX_GROWTH,
        "num_descriptors": MAX_GROWTH,
        "num_metric_lines": 0,
    }
    grown = {name: getattr(after, name) - getattr(before, name) for name in allowed}
    return {name: by for name, by in grown.items() if by > allowed[name]}


def connect(launcher: FakeLauncher, replica_id: str) -> ReplicaClient:
    deployment = Deployment.from_table({"model": "demo"})
    return launcher.connect(launcher.launch(deployment, replica_id, lambda progress: None).record)


def run_cycles(model: Path, launcher: FakeLauncher, count: int) -> None:
    async def scenario() -> None:
        first = connect(launcher, "replica-0")
        async with local_gateway(local_config(model), first, http=True, is_only_replica=False) as gateway:
            cycles = Cycles(gateway, launcher, first)
            await cycles.run(NUM_WARM_UP)
            before = await cycles.held()
            await cycles.run(count)
            after = await cycles.held_after(before)
        assert after.num_bytes - before.num_bytes < count * MAX_BYTES_PER_CYCLE
        assert growth(before, after) == {}

    asyncio.run(scenario())


def test_replica_cycles_leave_nothing_in_the_gateway(
    make_model: Callable[..., Path], launcher: FakeLauncher
) -> None:
    run_cycles(make_model("llama"), launcher, 12)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_replica_cycles_leave_the_gateways_memory_flat(
    make_model: Callable[..., Path], launcher: FakeLauncher
) -> None:
    tracemalloc.start()
    try:
        run_cycles(make_model("llama"), launcher, 1000)
    finally:
        tracemalloc.stop()
