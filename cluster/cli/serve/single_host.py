"""`quire serve` on one host: a local Ray cluster, one replica and a gateway, until a signal or a failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from ....proto.config import EngineConfig
from ....proto.errors import QuireError, ReplicaUnavailable
from ...config.engine_options import EngineOptions
from ...config.machine import Machine
from ...config.resolve import resolve
from ...config.server_options import ServerOptions
from ...fleet.ray.local_cluster import LocalCluster
from ...fleet.replica.client import SILENCE_MARGIN_S, ReplicaClient
from ...fleet.replica.fault_injection import RayFaultInjector
from ...fleet.replica.launch import launch_replica
from ...fleet.replica.record import ReplicaRecord
from ...fleet.replica.replica import Replica, new_replica_id
from ...fleet.replica.scheduler_start import replace_scheduler
from ...fleet.replica.stopwatch import Stopwatch
from ...fleet.replica.supervised_replica import ReplicaT, SupervisedReplica
from ...gateway.access.security import Security
from ...gateway.admin.services import GatewayServices
from ...gateway.routing.replica_pool import ReplicaPool
from ...gateway.routing.served_models import serve_single_replica
from ...os_utils.event_loop import run_event_loop
from ...os_utils.signals import (
    Interrupted,
    deliver_held_signal,
    ignore_signals,
    next_signal,
    raise_on_signals,
    signals_raise,
)
from ...os_utils.without_torch import keep_torch_out
from ...text.requests.observer import RequestObserver
from ...text.requests.tokenizer import Tokenizer, load_tokenizer
from .server_setup import request_observers, retention_limits
from .servers import GatewayServers

CANARY_TIMEOUT_S = 60.0
# Time for running streams to finish after a signal, and to receive the error after a failure. The replica and Ray
# take 0.8 to 1.4 s to end after it, so that a server under load has ended 5 s after the signal.
GRACE_S = 3.5
FAILURE_GRACE_S = 1.0

_log = logging.getLogger(__name__)


def serve(engine_options: EngineOptions, server_options: ServerOptions, security: Security) -> int:
    """Serve until SIGINT or SIGTERM. Call it from the main thread, which receives signals.

    Prints its addresses on stdout when the canary token has come through all ranks.

    Args:
        security: the one that `set_up_server` returned.

    Returns:
        The exit status: 0, or 128 plus the signal's number if the signal came before the server was ready.

    Raises:
        ConfigError: the server cannot start with these options.
        ReplicaUnavailable: the replica did not start, or one of its processes failed; the message names the rank.
            Clients have received the error.
    """
    stopwatch = Stopwatch()
    try:
        with ExitStack() as stack:
            stack.enter_context(signals_raise())
            observers = stack.enter_context(request_observers(server_options))
            pool = stack.enter_context(ThreadPoolExecutor(1, "prepare"))
            preparation = pool.submit(_prepare, engine_options)
            deliver_held_signal()  # Ray takes seconds to start
            cluster = stack.enter_context(LocalCluster(1 + engine_options.num_ranks))
            raise_on_signals()
            stopwatch.lap("ray")
            config, tokenizer = preparation.result()
            stopwatch.lap("prepare")
            replica = stack.enter_context(launch_replica(config, new_replica_id(), cluster))
            stopwatch.lap("replica")
            stack.callback(ignore_signals)
            return run_event_loop(
                _serve_replica(server_options, security, observers, replica, tokenizer, stopwatch)
            )
    except Interrupted as interrupted:
        return 128 + interrupted.signal_number


def _prepare(engine_options: EngineOptions) -> tuple[EngineConfig, Tokenizer]:
    """Read configuration and tokenizer, which takes a second because it imports transformers."""
    machine = Machine.this()  # imports torch if there is a GPU driver
    keep_torch_out()
    config = resolve(engine_options, machine)
    return config, load_tokenizer(config.model)


async def _serve_replica(
    server_options: ServerOptions,
    security: Security,
    observers: Sequence[RequestObserver],
    replica: Replica,
    tokenizer: Tokenizer,
    stopwatch: Stopwatch,
) -> int:
    """Serve until a signal, then return the exit status. Raises the error for which the replica was given up."""
    signaled = next_signal()
    config = replica.config
    _log.info("%s", config.summary)
    connect = partial(_connect, config)
    client = connect(replica.record)
    client.start()
    models = serve_single_replica(config, tokenizer, client)
    pool = models.find(config.model.name).pool
    failure = asyncio.create_task(keep_served(replica, pool, connect, replace_scheduler))
    services = GatewayServices.compose(
        models,
        security=security,
        retention=retention_limits(server_options),
        observers=observers,
        faults=RayFaultInjector(replica.record.namespace) if server_options.enable_chaos else None,
        allows_lora_updates=server_options.allow_runtime_lora_updating,
        allows_engine_control=server_options.server_dev_mode,
    )
    servers = GatewayServers(services, server_options)
    try:
        await servers.start()
        stopwatch.lap("gateway")
        for model in models:
            model.start_workers()
        is_ready = await servers.wait_until_ready(failure, signaled, timeout_s=CANARY_TIMEOUT_S)
        stopwatch.lap("canary")
        if is_ready:
            _log.info("ready after %.2f s: %s", stopwatch.total_s, stopwatch)
            servers.announce()
            await asyncio.wait((failure, signaled), return_when=asyncio.FIRST_COMPLETED)
        if failure.done():  # the replica is given up: clients have received the error, now the caller does
            await servers.stop(FAILURE_GRACE_S)
            raise failure.result()
        if not signaled.done():
            raise ReplicaUnavailable(f"no canary token came through all ranks in {CANARY_TIMEOUT_S:g} s")
        _log.info("stopping; running requests have %g s", GRACE_S)
        await servers.stop(GRACE_S)
        return 0 if is_ready else 128 + signaled.result()
    finally:
        failure.cancel()
        await asyncio.gather(failure, return_exceptions=True)
        await servers.stop(0)
        await models.close()


async def keep_served(
    live: ReplicaT,
    pool: ReplicaPool,
    connect: Callable[[ReplicaRecord], ReplicaClient],
    replace: Callable[[ReplicaT, int], ReplicaT],
) -> QuireError:
    """Replace the scheduler of a pool's only replica when it ends, until the replica is given up; return the error.

    The pool's requests have ended with the error then.

    Args:
        connect, replace: the same as for SupervisedReplica; `replace` blocks for seconds.
    """

    async def replace_in_pool(ended: ReplicaT, number: int) -> ReplicaT:
        pool.remove(ended.record.replica_id, "its scheduler is replaced")
        return await asyncio.to_thread(replace, ended, number)

    replica = SupervisedReplica(live, connect, replace_in_pool)
    try:
        while True:
            error = await replica.wait_until_failed()
            _fail_clients(pool, error)
            try:
                await replica.replace_scheduler(error)
            except QuireError as given_up:
                pool.retire()
                _fail_clients(pool, given_up)
                return given_up
            client = connect(replica.live.record)
            client.start()
            pool.add(client)
    finally:
        await replica.close()


def _fail_clients(pool: ReplicaPool, error: QuireError) -> None:
    for client in pool.clients.values():
        client.fail(str(error))


def _connect(config: EngineConfig, record: ReplicaRecord) -> ReplicaClient:
    silence_timeout_s = config.scheduler.step_timeout_s + SILENCE_MARGIN_S
    return ReplicaClient(record.endpoint, record.replica_id, silence_timeout_s=silence_timeout_s)
