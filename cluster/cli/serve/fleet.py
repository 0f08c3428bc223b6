"""`quire serve --address` and `quire fleet`: deploy models on Ray and run a gateway of the fleet until a signal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from ...config.deployment import ClusterOptions, Deployment
from ...config.server_options import ServerOptions
from ...fleet.controller.controller import find_or_start_controller
from ...fleet.controller.controller_client import ControllerClient
from ...fleet.controller.fleet_state import Deploy
from ...fleet.ray.launch_target import DEFAULT_NAMESPACE
from ...fleet.ray.local_cluster import LocalCluster, attach
from ...fleet.replica.fault_injection import RayFaultInjector
from ...gateway.access.security import Security
from ...gateway.admin.services import GatewayServices
from ...gateway.routing.controller_sync import ControllerSync
from ...gateway.routing.served_models import ServedModels
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
from .server_setup import request_observers, retention_limits
from .servers import GatewayServers

# Time for running streams to finish after a signal; other gateways accept the new calls meanwhile.
GRACE_S = 30.0

_log = logging.getLogger(__name__)


def serve_fleet(
    deployments: Sequence[Deployment],
    address: str | None,
    server_options: ServerOptions,
    cluster_options: ClusterOptions,
    security: Security,
    example_commands: Callable[[str], Iterable[str]] = lambda address: (),
) -> int:
    """Serve until SIGINT or SIGTERM. Call it from the main thread.

    Prints its addresses on stdout when requests can be served.

    Args:
        address: address of a Ray cluster, on which the fleet runs on without this gateway. None for a Ray instance on
            this machine, which ends with the gateway.
        cluster_options: ignored if the fleet's controller runs already.
        security: the one that `set_up_server` returned.
        example_commands: returns commands that call a server at an address, which are printed after the addresses.

    Returns:
        The exit status: 0, or 128 plus the signal's number if the signal came before the gateway was ready.

    Raises:
        ConfigError: the server cannot start with these options, or a model cannot be deployed with its own.
        ReplicaUnavailable: no cluster answers at the address, or its controller does not answer.
    """
    keep_torch_out()
    try:
        with ExitStack() as stack:
            stack.enter_context(signals_raise())
            observers = stack.enter_context(request_observers(server_options))
            deliver_held_signal()
            stack.enter_context(LocalCluster(_num_cpus(deployments)) if address is None else attach(address))
            raise_on_signals()
            controller = find_or_start_controller(DEFAULT_NAMESPACE, cluster_options)
            stack.callback(ignore_signals)
            return run_event_loop(
                _serve(deployments, controller, server_options, security, observers, example_commands)
            )
    except Interrupted as interrupted:
        return 128 + interrupted.signal_number


def _num_cpus(deployments: Sequence[Deployment]) -> int:
    """Return the CPU slots of all replicas and of another one of each model, for rolling updates."""
    return sum(
        (1 + each.limits.max_replicas) * (1 + each.engine.tensor_parallel_size)
        for deployment in deployments
        for each in deployment.parts
    )


async def _serve(
    deployments: Sequence[Deployment],
    controller: ControllerClient,
    server_options: ServerOptions,
    security: Security,
    observers: Sequence[RequestObserver],
    example_commands: Callable[[str], Iterable[str]],
) -> int:
    signaled = next_signal()
    models = ServedModels()
    sync = ControllerSync(controller, models)
    services = GatewayServices.compose(
        models,
        security=security,
        fleet=sync,
        retention=retention_limits(server_options),
        observers=observers,
        faults=RayFaultInjector(DEFAULT_NAMESPACE) if server_options.enable_chaos else None,
        allows_lora_updates=server_options.allow_runtime_lora_updating,
        allows_engine_control=server_options.server_dev_mode,
    )
    servers = GatewayServers(services, server_options)
    try:
        for deployment in deployments:
            _log.info("deploying %s; the fleet's controller checks the model first", deployment.name)
            deployed = await sync.apply(Deploy(deployment))
            _log.info("%s is deployed, version %s", deployment.name, deployed["version"])
        sync.start()
        await servers.start()
        _log.info("listening on %s; requests wait until a replica is ready", servers.addresses)
        is_ready = await servers.wait_until_ready(signaled)
        if is_ready:
            servers.announce(example_commands)
            await signaled
        _log.info("stopping; running requests have %g s", GRACE_S)
        await servers.stop(GRACE_S)
        return 0 if is_ready else 128 + signaled.result()
    finally:
        await servers.stop(0)
        await sync.close()
