"""`quire serve --address`: deploys models on a Ray cluster and serves a gateway before its fleet, until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from contextlib import ExitStack

from ..config.cluster_options import ClusterOptions
from ..config.deployment import Deployment
from ..config.server_options import ServerOptions
from ..controller_api.controller_client import ControllerClient
from ..fleet.controller import find_or_start_controller
from ..gateway.controller_sync import ControllerSync
from ..gateway.security import Security
from ..gateway.served_models import ServedModels
from ..gateway.server import Gateway
from ..host.signals import Interrupted, ignore_signals, next_signal, raise_on_signals, signals_raise
from ..ray_runtime.launch_target import DEFAULT_NAMESPACE
from ..ray_runtime.local_cluster import attach
from .server_setup import set_up_server

# For running streams to end after a signal; other gateways take the new calls meanwhile.
GRACE_S = 30.0

_log = logging.getLogger(__name__)


def serve_fleet(
    deployments: Sequence[Deployment],
    address: str,
    front: ServerOptions,
    cluster: ClusterOptions,
) -> int:
    """Serves until SIGINT or SIGTERM; the fleet goes on without this gateway. For the main thread.

    Prints one line on stdout once a request would be answered.

    Args:
        cluster: counts where the fleet's controller does not run yet.

    Returns:
        The exit status: 0, or 128 and the signal's number when one came before the gateway was ready.

    Raises:
        ConfigError: this cannot be started, or a model not be deployed, as it is asked for.
        ReplicaUnavailable: no cluster answers at the address, or its controller does not.
    """
    security = set_up_server(front)
    try:
        with ExitStack() as stack:
            stack.enter_context(signals_raise())
            stack.enter_context(attach(address))
            raise_on_signals()  # Ray has put its own handler in the place of ours
            controller = find_or_start_controller(DEFAULT_NAMESPACE, cluster)
            stack.callback(ignore_signals)
            return asyncio.run(_serve(deployments, controller, front, security))
    except SystemExit:  # while it connects, Ray has its own handler of SIGTERM
        return 128 + signal.SIGTERM
    except Interrupted as interrupted:
        return 128 + interrupted.signal_number


async def _serve(
    deployments: Sequence[Deployment], controller: ControllerClient, front: ServerOptions, security: Security
) -> int:
    signalled = next_signal()
    models = ServedModels()
    link = ControllerSync(controller, models)
    gateway = Gateway(models, front.listen, security=security, insecure=front.insecure, fleet=link)
    try:
        for deployment in deployments:
            await controller.deploy(deployment)
            _log.info("%s is deployed, version %s", deployment.name, deployment.version)
        link.start()
        address = await gateway.start()
        _log.info("listening on %s; requests wait until a replica is ready", address)
        ready = asyncio.ensure_future(gateway.wait_ready())
        await asyncio.wait((ready, signalled), return_when=asyncio.FIRST_COMPLETED)
        is_ready = ready.done()
        ready.cancel()
        if is_ready:
            print(f"quire is ready on {address}", flush=True)
            await signalled
        _log.info("stopping; running requests have %g s", GRACE_S)
        await gateway.stop(GRACE_S)
        return 0 if is_ready else 128 + signalled.result()
    finally:
        await gateway.stop(0)
        await link.close()
