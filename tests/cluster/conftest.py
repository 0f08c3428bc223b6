"""A replica without Ray: the real step loop on a thread, a tiny model in this process, a gateway before it."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.gateway import Gateway
from quire.cluster.in_process import InProcessGroup, load_in_process
from quire.cluster.replica_client import ReplicaClient
from quire.cluster.resolve import resolve
from quire.cluster.security import Security
from quire.cluster.tokenizer import Tokenizer
from quire.proto.config import EngineConfig
from quire.proto.step import StepPlan
from quire.scheduler.loop import StepLoop
from quire.scheduler.mailbox import ZmqMailbox
from quire.scheduler.scheduler import Scheduler

DEADLINE_S = 60.0


class Brake:
    """Holds the ranks before their next step while it is set."""

    def __init__(self) -> None:
        self._may_go = threading.Event()
        self._may_go.set()
        self.steps: list[StepPlan] = []

    def hold(self) -> None:
        self._may_go.clear()

    def release(self) -> None:
        self._may_go.set()

    def install(self, group: InProcessGroup) -> None:
        broadcast = group.broadcast

        def held_broadcast(plan: StepPlan) -> None:
            assert self._may_go.wait(DEADLINE_S), "the test never released the brake"
            self.steps.append(plan)
            broadcast(plan)

        group.broadcast = held_broadcast  # type: ignore[method-assign]


@dataclass
class LocalReplica:
    """A replica whose step loop runs on a thread of the test."""

    config: EngineConfig
    address: str
    scheduler: Scheduler
    brake: Brake
    stop: Callable[[], None]


@contextmanager
def local_replica(config: EngineConfig) -> Iterator[LocalReplica]:
    config, group = load_in_process(config)
    brake = Brake()
    brake.install(group)
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        mailbox = ZmqMailbox(f"ipc://{folder}/replica")
        scheduler = Scheduler(config)
        loop = StepLoop(scheduler, group, mailbox, "replica-0")
        thread = threading.Thread(target=loop.run)
        thread.start()

        def stop() -> None:
            brake.release()
            loop.stop()
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "the step loop does not end"

        try:
            yield LocalReplica(config, mailbox.endpoint, scheduler, brake, stop)
        finally:
            stop()
            mailbox.close()
            group.close()


@dataclass
class Server:
    """A gateway before a local replica.

    Attributes:
        target: the gateway's HOST:PORT.
        replica: the gateway's own client of the replica.
        brake: holds the replica's steps.
        scheduler: the replica's, which another thread drives: to look at.
    """

    target: str
    gateway: Gateway
    replica: ReplicaClient
    brake: Brake
    scheduler: Scheduler
    config: EngineConfig
    tokenizer: Tokenizer
    stop_replica: Callable[[], None]


ServerFactory = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serve(make_model: Callable[..., Path]) -> ServerFactory:
    """`serve(security=..., ready=True, **options of resolve)`: an asynchronous context with a running Server."""
    model = make_model("llama")

    @asynccontextmanager
    async def serving(
        *, security: Security | None = None, ready: bool = True, patience_s: float = 65.0, **options: Any
    ) -> AsyncIterator[Server]:
        settings = {"num_kv_blocks": 64, "max_num_seqs": 16, "max_num_batched_tokens": 64} | options
        config = resolve(str(model), served_model_name="tiny", device="cpu", audit=True, **settings)
        with local_replica(config) as local:
            replica = ReplicaClient(local.address, "replica-0", patience_s=patience_s, heartbeat_s=0.1)
            replica.start()
            tokenizer = Tokenizer(str(model))
            gateway = Gateway(local.config, tokenizer, replica, security=security)
            target = await gateway.start()
            try:
                if ready:
                    await asyncio.wait_for(gateway.wait_ready(), DEADLINE_S)
                yield Server(
                    target,
                    gateway,
                    replica,
                    local.brake,
                    local.scheduler,
                    local.config,
                    tokenizer,
                    local.stop,
                )
            finally:
                local.brake.release()
                await gateway.stop(0)
                await replica.close()

    return serving
