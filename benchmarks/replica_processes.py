"""Replicas in processes of their own, without Ray, and requests that move between two of them."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.routing.request_migration import MigratingRequest, Placement, Stage
from quire.cluster.offline.in_process import InProcessGroup, load_in_process
from quire.cluster.text.requests.request import Request
from quire.proto.sampling import SamplingParams
from quire.proto.step import StepPlan, StepResult
from quire.proto.transport.network import CurveKeys
from quire.scheduler import Scheduler, StepLoop
from quire.scheduler.core.queue import kv_moves
from quire.scheduler.service.zmq_mailbox import ZmqMailbox
from quire.worker.transfer import peers

START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class ReplicaProcess:
    """A replica with one rank.

    Attributes:
        endpoint: of its scheduler.
    """

    process: SpawnProcess
    endpoint: str

    def kill(self) -> None:
        """Kill the scheduler and its rank, as a machine that fails."""
        self.process.kill()
        self.process.join()


class _ThreadedGroup:
    """A rank that computes on a thread of its own: the scheduler goes on meanwhile, as with other processes."""

    def __init__(self, group: InProcessGroup, thread: ThreadPoolExecutor) -> None:
        self._group, self._thread = group, thread
        self._steps = deque[Future[StepResult]]()

    def broadcast(self, plan: StepPlan) -> None:
        self._steps.append(self._thread.submit(self._compute, plan))

    def _compute(self, plan: StepPlan) -> StepResult:
        self._group.broadcast(plan)
        return self._group.gather(0.0)

    def gather(self, timeout_s: float) -> StepResult | None:
        try:
            result = self._steps[0].result(timeout_s)
        except TimeoutError:
            return None
        self._steps.popleft()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def _as_it_is(role: str) -> None:
    """Leave a replica of this role as it is."""


def _serve(
    options: dict[str, Any],
    endpoint: str,
    keys: CurveKeys | None,
    lends_small: bool,
    prepare: Callable[[str], None],
    channel: Connection,
) -> None:
    """Run a replica until the process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare(options["role"])
    with ExitStack() as stack:
        if keys is not None:  # as between hosts
            stack.enter_context(mock.patch.object(peers, "MappedBlocks", side_effect=OSError))
            stack.enter_context(mock.patch.object(peers._Buffer, "address", return_value=None))
        if lends_small:
            stack.enter_context(mock.patch.object(kv_moves, "PULL_OVERHEAD_S", 0.0))
        thread = stack.enter_context(ThreadPoolExecutor(1, "rank"))
        config, group = thread.submit(
            load_in_process, resolve(EngineOptions(**options), Machine.this())
        ).result()
        kv = "tcp://127.0.0.1:*" if keys else f"{endpoint}.kv"
        thread.submit(group._runner.serve_blocks, kv, keys).result()
        mailbox = ZmqMailbox(endpoint)
        loop = StepLoop(Scheduler(config), _ThreadedGroup(group, thread), mailbox, Path(endpoint).name)
        channel.send(mailbox.endpoint)
        loop.run()


@contextmanager
def replica_processes(
    model: str,
    roles: tuple[str, ...],
    way: str = "memory",
    *,
    lends_small: bool = False,
    prepare: Callable[[str], None] = _as_it_is,
    **options: Any,
) -> Iterator[tuple[ReplicaProcess, ...]]:
    """Run a replica for each role.

    Args:
        way: ``memory``, or ``stream`` as between hosts.
        lends_small: chunks of prompts are lent however short they are.
        prepare: called in each process with its role, before anything else.
        options: of EngineOptions.

    Raises:
        TimeoutError: a replica does not start.
    """
    spawn = multiprocessing.get_context("spawn")
    keys = None if way == "memory" else CurveKeys.generate()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-"))
        started = []
        for number, role in enumerate(roles):
            own, other = spawn.Pipe()
            settings = {"model": model, "device": "cpu", "role": role, "kv_transfer": True} | options
            endpoint = f"ipc://{folder}/{number}-{role}"
            process = spawn.Process(
                target=_serve, args=(settings, endpoint, keys, lends_small, prepare, other), daemon=True
            )
            process.start()
            started.append((own, ReplicaProcess(process, endpoint)))
            stack.callback(started[-1][1].kill)
        for channel, replica in started:
            if not channel.poll(START_TIMEOUT_S):
                raise TimeoutError(f"{replica.endpoint} did not start in {START_TIMEOUT_S:g} s")
            channel.recv()
        yield tuple(replica for _, replica in started)


@asynccontextmanager
async def clients_of(*replicas: ReplicaProcess) -> AsyncIterator[tuple[ReplicaClient, ...]]:
    """Return a gateway's clients of replicas, which have answered."""
    clients = tuple(
        ReplicaClient(each.endpoint, Path(each.endpoint).name, heartbeat_s=0.2) for each in replicas
    )
    for client in clients:
        client.start()
    try:
        for client in clients:
            while (status := client.latest_status) is None or not status.kv_layout:
                if client.num_running == 0 and status is not None:  # ranks report with results
                    await _first_token(client)
                await client.next_status(START_TIMEOUT_S)
        yield clients
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def _first_token(client: ReplicaClient) -> None:
    async for _ in client.submit(make_request([1, 2, 3], 1)):
        pass


def make_request(prompt: list[int], num_tokens: int, salt: bytes = b"") -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=0)
    return Request(f"request-{time.monotonic_ns()}", np.array(prompt, np.int32), sampling, salt=salt)


@dataclass
class TwoRoles:
    """A ReplicaPicker that has each prompt computed by one replica and continued by the other, while that lives.

    Attributes:
        in_chunks: blocks travel while the rest of the prompt is computed.
        num_chosen: replicas that were chosen, by stage.
    """

    prefill: ReplicaClient
    decode: ReplicaClient
    in_chunks: bool = True
    num_chosen: dict[Stage, int] = field(default_factory=dict)

    def drain(self, replica_id: str) -> None:
        """Do nothing: a replica that drains ends by itself."""

    def choose(self, request: Request, stage: Stage) -> Placement | None:
        self.num_chosen[stage] = self.num_chosen.get(stage, 0) + 1
        if stage is Stage.BRINGS_KV and not self.in_chunks:
            return None
        return self._place(stage)

    def _place(self, stage: Stage) -> Placement:
        is_split = stage is Stage.BEGINS and not self.decode.has_failed
        if is_split or self.decode.has_failed:
            return Placement(self.prefill, START_TIMEOUT_S if is_split else None)
        return Placement(self.decode)

    async def wait_for_replica(self, request: Request, timeout_s: float | None, stage: Stage) -> Placement:
        return self._place(stage)


async def token_times(running: MigratingRequest) -> tuple[list[int], list[float]]:
    """Return the tokens of a request with one output, and when each came."""
    tokens, times = list[int](), list[float]()
    async for _, update in running:
        tokens += update.token_ids
        times += [time.monotonic()] * len(update.token_ids)
    return tokens, times
