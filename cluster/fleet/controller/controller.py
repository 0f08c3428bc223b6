"""FleetController: the Fleet as a Ray actor, and the function that finds or starts it.

The actor is detached, and Ray restarts it when it dies. Its state is in Ray's key-value store; replicas and gateways
run on without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import ray

from ....proto.transport.network import CurveKeys
from ...config.cluster_options import ClusterOptions
from ...config.deployment import Deployment
from ...config.model_source import pin_revision
from ...config.resolve import resolve_deployment
from ...os_utils.logs import log_to_stderr
from ..ray.compat import HEAD_NODE_RESOURCE
from .commands import Deploy, FleetCommand
from .controller_client import ControllerClient
from .demand import Demand
from .fleet import Fleet
from .fleet_state import FleetState
from .ray_launcher import KeyValueStore, RayLauncher

ACTOR_NAME = "quire/controller"
# The controller runs on the head node, which lives as long as the cluster.
_HEAD_RESOURCE = {HEAD_NODE_RESOURCE: 0.001}
# Concurrent calls: every gateway has one `watch` call open.
_MAX_CALLS = 1000

_log = logging.getLogger(__name__)

T = TypeVar("T")


class FleetController:
    """The Fleet as a Ray actor. The fleet's event loop runs in a thread of its own, from the actor's start on.

    Args:
        keys: for all connections to replicas; a restarted actor gets the same keys from Ray.
    """

    def __init__(self, keys: CurveKeys, namespace: str, options: ClusterOptions) -> None:
        log_to_stderr()
        self._keys = keys
        self._fleet: Future[Fleet] = Future()
        autoscaling_config = None if options.autoscaling_config is None else str(options.autoscaling_config)
        launcher = RayLauncher(keys, namespace, autoscaling_config, options.spot_notices)
        store = KeyValueStore(namespace)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, args=(launcher, store), name="fleet", daemon=True).start()

    async def keys(self) -> CurveKeys:
        return self._keys

    async def watch(self, since: str, timeout_s: float) -> FleetState | None:
        """See `Fleet.watch`."""
        return await self._call(lambda fleet: fleet.watch(since, timeout_s))

    async def report(self, gateway_id: str, demand: Mapping[str, Demand]) -> None:
        """See `Fleet.report`."""
        fleet = await asyncio.wrap_future(self._fleet)
        self._loop.call_soon_threadsafe(fleet.report, gateway_id, demand)

    async def apply(self, command: FleetCommand) -> Mapping[str, Any]:
        """See `Fleet.apply`. A model that cannot be served is refused before anything is started for it."""
        if isinstance(command, Deploy):
            command = Deploy(await asyncio.to_thread(_pinned_and_checked, command.deployment))
        return await self._call(lambda fleet: fleet.apply(command))

    async def pid(self) -> int:
        """Return the pid of the actor's process."""
        return os.getpid()

    async def _call(self, method: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of the fleet in the fleet's event loop."""
        fleet = await asyncio.wrap_future(self._fleet)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(method(fleet), self._loop))

    def _run(self, launcher: RayLauncher, store: KeyValueStore) -> None:
        try:
            self._loop.run_until_complete(self._run_fleet(launcher, store))
        except BaseException:
            # Without the loop the actor would accept calls and do nothing. Ray restarts the process.
            _log.exception("the fleet's event loop failed; the controller restarts")
            os._exit(1)

    async def _run_fleet(self, launcher: RayLauncher, store: KeyValueStore) -> None:
        fleet = Fleet(launcher, store)
        await fleet.recover()
        self._fleet.set_result(fleet)
        await fleet.run()


def _pinned_and_checked(deployment: Deployment) -> Deployment:
    """Return the deployment with the commit of its model. Raises QuireError if the model cannot be served."""
    pinned = pin_revision(deployment)
    resolve_deployment(pinned, has_gpus=True)
    return pinned


def find_or_start_controller(namespace: str, options: ClusterOptions) -> ControllerClient:
    """Return the controller of the attached cluster. If there is none, start one with these options."""
    actor = (
        ray.remote(FleetController)
        .options(
            name=ACTOR_NAME,
            namespace=namespace,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=_MAX_CALLS,
            num_cpus=0,
            resources=_HEAD_RESOURCE,
        )
        .remote(CurveKeys.generate(), namespace, options)
    )
    return ControllerClient(actor)
