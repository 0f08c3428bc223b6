"""`quire serve`: a local cluster, a replica on it and a gateway before it, until a signal or a failure."""

from __future__ import annotations

import asyncio
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from ...proto.config import EngineConfig
from ...proto.errors import ReplicaUnavailable
from ..config.engine_options import EngineOptions
from ..config.resolve import Machine, resolve
from ..config.server_options import ServerOptions
from ..gateway.security import Security
from ..gateway.served_models import serve_single_replica
from ..gateway.server import Gateway
from ..host.signals import Interrupted, ignore_signals, next_signal, raise_on_signals, signals_raise
from ..host.stopwatch import Stopwatch
from ..ray_runtime.local_cluster import LocalCluster
from ..replica.client import SILENCE_MARGIN_S, ReplicaClient
from ..replica.launch import launch_replica
from ..replica.replica import Replica, new_replica_id
from ..requests.tokenizer import Tokenizer
from .server_setup import set_up_server

CANARY_TIMEOUT_S = 60.0
# For running streams to end after a signal, and to be told after a failure.
GRACE_S = 5.0
FAILURE_GRACE_S = 1.0
# A mistake in the options shows within this time; everything else is looked into while Ray starts.
_HASTE_S = 0.2

_log = logging.getLogger(__name__)


def serve(engine: EngineOptions, front: ServerOptions) -> int:
    """Serves until SIGINT or SIGTERM. Prints one line on stdout once a token has come through all ranks.

    For the main thread, which signals reach.

    Returns:
        The exit status: 0, or 128 and the signal's number when one came before the server was ready.

    Raises:
        ConfigError: this cannot be started as it is asked for.
        ReplicaUnavailable: it did not start, or a process of it failed; names the rank. Clients have been told.
    """
    stopwatch = Stopwatch()
    security = set_up_server(front)
    try:
        with ExitStack() as stack:
            stack.enter_context(signals_raise())
            preparation = stack.enter_context(ThreadPoolExecutor(1, "prepare")).submit(_prepare, engine)
            with suppress(TimeoutError):
                preparation.result(_HASTE_S)
            cluster = stack.enter_context(LocalCluster(1 + engine.tensor_parallel_size))
            raise_on_signals()  # Ray has put its own handler in the place of ours
            stopwatch.lap("ray")
            config, tokenizer = preparation.result()
            stopwatch.lap("prepare")
            replica = stack.enter_context(launch_replica(config, new_replica_id(), cluster))
            stopwatch.lap("replica")
            stack.callback(ignore_signals)
            return asyncio.run(_serve_replica(front, security, replica, tokenizer, stopwatch))
    except SystemExit:  # while it starts, Ray has its own handler of SIGTERM
        return 128 + signal.SIGTERM
    except Interrupted as interrupted:
        return 128 + interrupted.signal_number


def _prepare(engine: EngineOptions) -> tuple[EngineConfig, Tokenizer]:
    """What takes seconds beside Ray's start: reading both imports transformers."""
    config = resolve(engine, Machine.this())
    return config, Tokenizer(config.model.path)


async def _serve_replica(
    front: ServerOptions, security: Security, replica: Replica, tokenizer: Tokenizer, stopwatch: Stopwatch
) -> int:
    """Serves until a signal (then returns the exit status) or the replica's failure (then raises it)."""
    failure = asyncio.wrap_future(replica.failure)
    signalled = next_signal()
    config = replica.config
    silence_timeout_s = config.scheduler.step_timeout_s + SILENCE_MARGIN_S
    client = ReplicaClient(replica.address, replica.replica_id, silence_timeout_s=silence_timeout_s)
    client.start()
    models = serve_single_replica(config, tokenizer, client)
    gateway = Gateway(models, front.listen, security=security, insecure=front.insecure)
    try:
        address = await gateway.start()
        stopwatch.lap("gateway")
        ready = asyncio.ensure_future(gateway.wait_ready())
        await asyncio.wait(
            (ready, failure, signalled), timeout=CANARY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        stopwatch.lap("canary")
        is_ready = ready.done()
        ready.cancel()
        if is_ready:
            _log.info("ready after %.2f s: %s", stopwatch.total_s, stopwatch)
            print(f"quire is ready on {address}", flush=True)
            await asyncio.wait((failure, signalled), return_when=asyncio.FIRST_COMPLETED)
        if failure.done():  # the replica has ended: the clients are told, then whoever started us
            error = failure.result() or ReplicaUnavailable(f"{replica.replica_id} ended")
            client.fail(str(error))
            await gateway.stop(FAILURE_GRACE_S)
            raise error
        if not signalled.done():
            raise ReplicaUnavailable(f"no canary token came through all ranks in {CANARY_TIMEOUT_S:g} s")
        _log.info("stopping; running requests have %g s", GRACE_S)
        await gateway.stop(GRACE_S)
        return 0 if is_ready else 128 + signalled.result()
    finally:
        failure.cancel()
        await gateway.stop(0)
        await models.close()
