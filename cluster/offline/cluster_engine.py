"""ClusterEngine: several ranks in a private local Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from ...proto.config import EngineConfig
from ...proto.engine_command import COMMAND_TIMEOUT_S, EngineCommand
from ...proto.replica_status import ReplicaStatus
from ...proto.stream import FlushCache
from ...scheduler import WorkerGroup
from ..fleet.ray.local_cluster import LocalCluster
from ..fleet.replica.client import ReplicaClient
from ..fleet.replica.launch import launch_replica
from ..fleet.replica.replica import new_replica_id
from ..text.requests.output_processor import OutputProcessor
from ..text.requests.outputs import OutputEvent
from ..text.requests.sequence_update import RequestStream
from .engine import OutputCollector
from .in_process import load_in_process

# A step may take step_timeout_s; this much longer is allowed before the replica is considered lost.
_SILENCE_MARGIN_S = 5.0
# A scheduler answers within 0.1 s, but for a machine that is overloaded.
_STATUS_TIMEOUT_S = 60.0

T = TypeVar("T")


class ClusterEngine:
    """A replica in a Ray cluster of its own. Implements `Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        with ExitStack() as opened:
            cluster = opened.enter_context(LocalCluster(1 + config.parallel.num_ranks))
            self._replica = opened.enter_context(launch_replica(config, new_replica_id(), cluster))
            self._opened = opened.pop_all()
        self.config = self._replica.config

    def run(self, collectors: list[OutputCollector], advance: Callable[[], None]) -> None:
        _run_to_end(self._run(collectors, advance))

    def control(self, command: EngineCommand) -> None:
        _run_to_end(self._control(command))

    def flush_cache(self) -> None:
        _run_to_end(self._flush_cache())

    def status(self) -> ReplicaStatus:
        return _run_to_end(self._status())

    async def _flush_cache(self) -> None:
        async with self.connect() as client:
            client.send(FlushCache())
            await client.status(_STATUS_TIMEOUT_S)  # the scheduler answers after it has flushed

    async def _status(self) -> ReplicaStatus:
        async with self.connect() as client:
            return await client.status(_STATUS_TIMEOUT_S)

    async def _run(self, collectors: list[OutputCollector], advance: Callable[[], None]) -> None:
        async with self.connect() as client:
            await asyncio.gather(*(_follow(client, collector, advance) for collector in collectors))

    async def _control(self, command: EngineCommand) -> None:
        async with self.connect() as client:
            await client.control(command, COMMAND_TIMEOUT_S)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ReplicaClient]:
        client = ReplicaClient(
            self._replica.address,
            self._replica.replica_id,
            silence_timeout_s=self.config.scheduler.step_timeout_s + _SILENCE_MARGIN_S,
        )
        client.start()
        client.fail_after(self._replica.failure)
        try:
            yield client
        finally:
            await client.close()

    def close(self) -> None:
        self._opened.close()


@contextmanager
def open_ranks(config: EngineConfig) -> Iterator[tuple[EngineConfig, WorkerGroup]]:
    """Yield the ranks of a replica, which this process drives, and the configuration with the number of KV blocks.

    A single rank is in this process, several are processes of a local Ray cluster.

    Raises:
        ModelLoadError: the model directory cannot be read.
        ConfigError: the KV cache does not fit.
        ReplicaUnavailable: a rank's process did not start, or did not join this one.
    """
    tp = config.parallel.tensor_parallel_size
    with ExitStack() as opened:
        ranks: WorkerGroup
        if tp == 1:
            config, ranks = load_in_process(config)
        else:
            cluster = opened.enter_context(LocalCluster(1 + tp))
            replica = opened.enter_context(launch_replica(config, new_replica_id(), cluster))
            config, ranks = replica.config, replica.take_ranks()
        opened.callback(ranks.close)
        yield config, ranks


async def _follow(client: ReplicaClient, collector: OutputCollector, advance: Callable[[], None]) -> None:
    # No caller sees a part of an output, and waking this task for each token takes time from the ranks.
    running = client.submit(collector.request, wakes_at_ends=not collector.finds_stops)
    try:
        async for event in _output_events(running, collector.processor):
            collector.events.append(event)
        advance()
    finally:
        running.abort()


def _run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, also if this thread runs an event loop already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def _output_events(stream: RequestStream, processor: OutputProcessor) -> AsyncIterator[OutputEvent]:
    """Yield the events of a request until it ends. Stops each sequence at its stop string.

    Raises:
        QuireError: the error that ended the request. Its other sequences may still run: the caller aborts them.
    """
    async for index, update in stream:
        for event in processor.process(index, update):
            yield event
        if processor.has_stop_string(index):
            stream.stop(index)
