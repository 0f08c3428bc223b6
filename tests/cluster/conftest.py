"""Fixture `serve`: a gateway with a local replica, which has the real step loop and a tiny model."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local_replica import DEADLINE_S, Brake, local_replica

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.resolve import Machine, resolve
from quire.cluster.gateway.security import Security
from quire.cluster.gateway.served_models import ServedModels, serve_single_replica
from quire.cluster.gateway.server import Gateway
from quire.cluster.replica.client import ReplicaClient
from quire.cluster.requests.tokenizer import Tokenizer
from quire.proto.config import EngineConfig
from quire.scheduler.core.scheduler import Scheduler


@pytest.fixture(autouse=True, scope="module")
def collect_garbage_after_module() -> Iterator[None]:
    """Collect garbage after each module: asyncio logs unretrieved exceptions when their futures are collected.

    In a later module the log would be attributed to that module's test. On Python 3.11 the traceback that asyncio
    logs also breaks an `ast.parse` during which the collection runs.
    """
    yield
    gc.collect()


@dataclass
class Server:
    """A gateway with a local replica.

    Attributes:
        target: the gateway's HOST:PORT.
        replica: the gateway's client of the replica.
        brake: holds the replica's steps.
        scheduler: the replica's; another thread runs it, so tests only read it.
    """

    target: str
    gateway: Gateway
    replica: ReplicaClient
    brake: Brake
    scheduler: Scheduler
    config: EngineConfig
    tokenizer: Tokenizer
    models: ServedModels
    stop_replica: Callable[[], None]


ServerFactory = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serve(make_model: Callable[..., Path]) -> ServerFactory:
    """`serve(security=..., ready=True, **options of resolve)`: an asynchronous context with a running Server.

    `model_dir` is the served model; default: a tiny Llama.
    """
    tiny = make_model("llama")

    @asynccontextmanager
    async def serving(
        *,
        security: Security | None = None,
        ready: bool = True,
        silence_timeout_s: float = 65.0,
        model_dir: Path | None = None,
        **options: Any,
    ) -> AsyncIterator[Server]:
        model = tiny if model_dir is None else model_dir
        settings = {"num_kv_blocks": 64, "max_num_seqs": 16, "max_num_batched_tokens": 64} | options
        engine_options = EngineOptions(
            str(model), served_model_name="tiny", device="cpu", audit=True, **settings
        )
        config = resolve(engine_options, Machine.this())
        with local_replica(config) as local:
            replica = ReplicaClient(
                local.address, "replica-0", silence_timeout_s=silence_timeout_s, heartbeat_s=0.1
            )
            replica.start()
            tokenizer = Tokenizer(str(model))
            models = serve_single_replica(local.config, tokenizer, replica)
            gateway = Gateway(models, security=security)
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
                    models,
                    local.stop,
                )
            finally:
                local.brake.release()
                await gateway.stop(0)
                await models.close()

    return serving
