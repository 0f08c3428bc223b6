"""local_server: the servers of a gateway over a local replica, with the real step loop and a tiny model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from local_replica import DEADLINE_S, Brake, Script, local_replica

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.access.security import Security
from quire.cluster.gateway.admin.services import GatewayServices
from quire.cluster.gateway.generation.retention import RetentionLimits
from quire.cluster.gateway.grpc.server import Gateway
from quire.cluster.gateway.http.connection import ConnectionLimits
from quire.cluster.gateway.http.server import HttpServer
from quire.cluster.gateway.routing.served_models import ServedModels, serve_single_replica
from quire.cluster.text.requests.tokenizer import Tokenizer, load_tokenizer
from quire.proto.config import EngineConfig
from quire.proto.replica_status import ReplicaStatus
from quire.scheduler.core.scheduler import Scheduler

T = TypeVar("T")
# Longer than a busy machine keeps the replica's thread from running; see `Server.be_silent`.
SILENCE_TIMEOUT_S = 65.0


@dataclass
class Server:
    """A gateway with a local replica.

    Attributes:
        target: the gRPC server's HOST:PORT.
        http: None unless it was asked for.
        replica: the gateway's client of the replica.
        brake: holds the replica's steps.
        script: replaces the sampled tokens.
        scheduler: the replica's; another thread runs it, so tests only read it.
    """

    target: str
    gateway: Gateway
    http: HttpServer | None
    replica: ReplicaClient
    brake: Brake
    script: Script
    scheduler: Scheduler
    config: EngineConfig
    tokenizer: Tokenizer
    services: GatewayServices
    stop_replica: Callable[[], None]

    def be_silent(self) -> None:
        """Hold the replica before its next step, and let its client miss it soon."""
        self.brake.hold()
        self.replica.silence_timeout_s = 0.5

    def speak_again(self) -> None:
        self.replica.silence_timeout_s = SILENCE_TIMEOUT_S
        self.brake.release()

    @property
    def models(self) -> ServedModels:
        return self.services.models

    @property
    def url(self) -> str:
        assert self.http is not None, "the server has no HTTP"
        return self.http.url


@asynccontextmanager
async def local_server(
    model_dir: Path,
    *,
    security: Security | None = None,
    retention: RetentionLimits | None = None,
    ready: bool = True,
    http: bool = False,
    http_limits: ConnectionLimits | None = None,
    allows_lora_updates: bool = False,
    allows_engine_control: bool = False,
    batch_dir: Path | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """Run the servers of a gateway.

    Args:
        ready: wait until requests are served.
        http: run the HTTP server as well.
        options: of EngineOptions.
    """
    config = local_config(model_dir, **options)
    with local_replica(config) as local:
        replica = ReplicaClient(
            local.address, "replica-0", silence_timeout_s=SILENCE_TIMEOUT_S, heartbeat_s=0.1
        )
        async with local_gateway(
            local.config,
            replica,
            security=security,
            retention=retention,
            http=http,
            http_limits=http_limits,
            allows_lora_updates=allows_lora_updates,
            allows_engine_control=allows_engine_control,
            batch_dir=batch_dir,
        ) as servers:
            try:
                if ready:
                    await asyncio.wait_for(servers.gateway.wait_ready(), DEADLINE_S)
                yield Server(
                    servers.target, servers.gateway, servers.http, replica, local.brake, local.script,
                    local.scheduler, local.config, servers.tokenizer, servers.services, local.stop,
                )  # fmt: skip
            finally:
                local.brake.release()
                local.brake.speed_up()


def local_config(model_dir: Path, **options: Any) -> EngineConfig:
    """Return the configuration of a small replica of the model; `options` are those of EngineOptions."""
    settings = {"num_kv_blocks": 64, "max_num_seqs": 16, "max_num_batched_tokens": 64} | options
    engine_options = EngineOptions(
        str(model_dir), served_model_name="tiny", device="cpu", audit=True, **settings
    )
    return resolve(engine_options, Machine.this())


@dataclass
class LocalGateway:
    """The servers of a gateway, without its replica; the attributes are those of Server."""

    target: str
    gateway: Gateway
    http: HttpServer | None
    tokenizer: Tokenizer
    services: GatewayServices


@asynccontextmanager
async def local_gateway(
    config: EngineConfig,
    replica: ReplicaClient,
    *,
    is_only_replica: bool = True,
    security: Security | None = None,
    retention: RetentionLimits | None = None,
    http: bool = False,
    http_limits: ConnectionLimits | None = None,
    allows_lora_updates: bool = False,
    allows_engine_control: bool = False,
    batch_dir: Path | None = None,
) -> AsyncIterator[LocalGateway]:
    """Run the servers of a gateway of the replica, which is started and closed with them."""
    replica.start()
    tokenizer = load_tokenizer(config.model)
    models = serve_single_replica(config, tokenizer, replica)
    if is_only_replica:
        models.find("").pool.retire()
    services = GatewayServices.compose(
        models,
        security=security,
        retention=retention,
        allows_lora_updates=allows_lora_updates,
        allows_engine_control=allows_engine_control,
    )
    gateway = Gateway(services)
    http_server = HttpServer(services, limits=http_limits, batch_dir=batch_dir) if http else None
    target = await gateway.start()
    if http_server is not None:
        await http_server.start()
    try:
        yield LocalGateway(target, gateway, http_server, tokenizer, services)
    finally:
        await gateway.stop(0)
        if http_server is not None:
            await http_server.stop(0)
        await models.close()


@dataclass
class ThreadedServer:
    """A server whose event loop runs on a thread of its own, for clients that block."""

    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.server.url

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_S)

    def await_status(self) -> None:
        """Wait for a status of the replica: calls that ask a busy one return an earlier status after 0.4 s."""
        self.run(self.server.replica.status(DEADLINE_S))

    def wait_until_free(self) -> None:
        """Wait until no sequence runs or waits and no KV block is used."""
        self._wait_until(
            lambda status: not (status.num_used_blocks or status.num_running or status.num_waiting)
        )

    def wait_until_running(self) -> None:
        """Wait until a sequence runs."""
        self._wait_until(lambda status: status.num_running > 0)

    def _wait_until(self, condition: Callable[[ReplicaStatus], bool]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(DEADLINE_S):
                while not condition(await self.server.replica.status(DEADLINE_S)):
                    pass

        self.run(wait())


@contextmanager
def threaded_server(model_dir: Path, **options: Any) -> Iterator[ThreadedServer]:
    """Run a server with HTTP on a thread; `options` are those of `local_server`."""
    started: list[ThreadedServer] = []
    is_started, may_stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with local_server(model_dir, http=True, **options) as server:
            started.append(ThreadedServer(server, asyncio.get_running_loop()))
            is_started.set()
            await may_stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            is_started.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    is_started.wait(DEADLINE_S)
    assert started, "the server did not start; its traceback is in the output"
    try:
        yield started[0]
    finally:
        started[0].loop.call_soon_threadsafe(may_stop.set)
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not stop"
