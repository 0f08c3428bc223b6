"""FleetController: the Fleet as a Ray actor, on Ray's launcher and store, and the function that finds or starts it.

The actor is detached, and Ray restarts it when it dies. Its state is in Ray's key-value store; replicas and gateways
run on without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ....proto.errors import ReplicaUnavailable
from ....proto.transport.network import CurveKeys
from ...config.deployment import ClusterOptions, Deployment
from ...config.machine import smallest_gpu_of_nodes
from ...config.model_source import pin_revision
from ...config.resolve import resolve_deployment
from ...os_utils.logs import log_to_stderr
from ..ray import compat
from ..ray.compat import HEAD_NODE_RESOURCE
from ..ray.launch_target import FleetLaunchTarget
from ..replica.client import ReplicaClient
from ..replica.launch import launch_replica
from ..replica.launch_progress import OnProgress
from ..replica.placement import ClusterView
from ..replica.record import ReplicaRecord
from ..replica.replica import Replica, adopt_replica, known_replicas, remove_replica
from ..replica.scheduler_start import replace_scheduler
from ..replica.supervised_replica import LiveReplica
from .controller_client import ControllerClient
from .fleet import Fleet
from .fleet_state import Demand, Deploy, FleetCommand, FleetState, NodeEntry
from .spot import wait_for_notice

# Value of the option `spot` |-> labels of the nodes, in the order of preference.
_SPOT, _ON_DEMAND = {"quire.io/spot": "true"}, {"quire.io/spot": "false"}
_SPOT_SELECTORS: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "any": ({},),
    "prefer": (_SPOT, _ON_DEMAND),
    "only": (_SPOT,),
    "never": (_ON_DEMAND,),
}
# Resources of a node that are shown to operators.
_SHOWN_RESOURCES = ("CPU", "GPU", "memory")

ACTOR_NAME = "quire/controller"
# The controller runs on the head node, which lives as long as the cluster.
_HEAD_RESOURCE = {HEAD_NODE_RESOURCE: 0.001}
# Replicas of a model that a new one may fill its copy of the files from.
_NUM_KNOWN_LOADS = 8
# Concurrent calls: every gateway has one `watch` call open.
_MAX_CALLS = 1000

_log = logging.getLogger(__name__)

T = TypeVar("T")


class RayLauncher:
    """See `interfaces.Launcher`. For a process that is connected to the cluster.

    Args:
        autoscaling_config: see `placement.ClusterView.read`.
        spot_notices: the cloud whose notices the nodes watch for; None for no cloud.
    """

    def __init__(
        self, keys: CurveKeys, namespace: str, autoscaling_config: str | None, spot_notices: str | None
    ) -> None:
        self._spot_notices = spot_notices
        self._keys = keys
        self._namespace = namespace
        self._autoscaling_config = autoscaling_config
        self._target = FleetLaunchTarget(keys, namespace, autoscaling_config=autoscaling_config)
        self._lock = threading.Lock()  # guards what follows: launches run in threads
        # Path of a model |-> replicas that have begun to load it, the latest first.
        self._loads: dict[str, deque[str]] = {}

    def launch(
        self, deployment: Deployment, replica_id: str, on_progress: OnProgress, peers: Sequence[str] = ()
    ) -> Replica:
        view = ClusterView.read(self._autoscaling_config)
        nodes = [node.total for node in view.nodes] + [node_type.resources for node_type in view.node_types]
        with_gpus = [resources for resources in nodes if resources.get("GPU", 0)]
        # If the deployment names "GPU" in rank_resources, that resource only places ranks, for example on fake nodes:
        # the ranks compute on CPUs.
        rank_resources = dict(deployment.rank_resources)
        has_gpus = bool(with_gpus) and "GPU" not in rank_resources
        config = resolve_deployment(deployment, has_gpus, smallest_gpu_of_nodes(with_gpus))
        launch_target = replace(
            self._target,
            resources_per_rank=rank_resources,
            node_selectors=_SPOT_SELECTORS[deployment.spot],
        )
        return launch_replica(
            config,
            replica_id,
            launch_target,
            version=deployment.version,
            peers=peers,
            begin_load=partial(self._begin_load, config.model.path, replica_id),
            on_progress=on_progress,
        )

    def _begin_load(self, model_path: str, replica_id: str) -> list[str]:
        """Return the replicas that have begun to load a model before this one."""
        with self._lock:
            loads = self._loads.setdefault(model_path, deque(maxlen=_NUM_KNOWN_LOADS))
            earlier = list(loads)
            loads.appendleft(replica_id)
        return earlier

    def adopt(self, record: ReplicaRecord) -> Replica:
        return adopt_replica(record, self._target)

    def replace_scheduler(self, live: LiveReplica, number: int) -> Replica:
        assert isinstance(live, Replica), "it was launched or adopted by this launcher"
        return replace_scheduler(live, number)

    def remove(self, replica_id: str) -> None:
        remove_replica(replica_id, self._namespace)

    def known(self) -> set[str]:
        return known_replicas(self._namespace)

    def nodes(self) -> tuple[NodeEntry, ...]:
        draining = compat.draining_nodes()
        return tuple(
            NodeEntry(
                node["NodeID"],
                node["NodeManagerAddress"],
                tuple(
                    (name, node["Resources"][name]) for name in _SHOWN_RESOURCES if name in node["Resources"]
                ),
                is_draining=node["NodeID"] in draining,
                gone_at=draining.get(node["NodeID"], 0) / 1000,
            )
            for node in ray.nodes()
            if node["Alive"]
        )

    def cordon(self, node_id: str) -> None:
        if problem := compat.drain_node(node_id, "quire drain"):
            raise ReplicaUnavailable(f"Ray refused to drain node {node_id}: {problem}")

    def connect(self, record: ReplicaRecord, silence_timeout_s: float) -> ReplicaClient:
        return ReplicaClient(
            record.endpoint,
            record.replica_id,
            silence_timeout_s=silence_timeout_s,
            load_only=True,
            keys=self._keys,
        )

    def notice(self, node_id: str) -> Future[float] | None:
        if self._spot_notices is None:
            return None
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        watch = ray.remote(wait_for_notice).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        future: Future[float] = watch.remote(self._spot_notices).future()
        return future


class KeyValueStore:
    """Ray's key-value store, held by its head node; see `interfaces.Store`."""

    def __init__(self, namespace: str) -> None:
        # Ray splits names at colons, and then finds none of the names that it lists.
        self._namespace = f"quire-fleet-{namespace}".replace(":", "-").encode()

    def read(self) -> Mapping[str, str]:
        found = {}
        for name in compat.kv_keys(self._namespace):
            text = compat.kv_get(name, self._namespace)
            if text is not None:  # deleted since it was listed
                found[name.decode()] = text.decode()
        return found

    def write(self, name: str, text: str) -> None:
        compat.kv_put(name.encode(), text.encode(), self._namespace)

    def delete(self, name: str) -> None:
        compat.kv_delete(name.encode(), self._namespace)


class FleetController:
    """The Fleet as a Ray actor. The fleet's event loop runs in a thread of its own, from the actor's start on.

    Args:
        keys: used for all connections to replicas; a restarted actor gets the same keys from Ray.
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
        """See `Fleet.watch`; for gateways of earlier releases."""
        return await self._call(lambda fleet: fleet.watch(since, timeout_s))

    async def changes(self, since: str, timeout_s: float) -> bytes | None:
        """See `Fleet.changes`; for gateways of the previous release."""
        return await self._call(lambda fleet: fleet.changes(since, timeout_s))

    async def follow(self, gateway_id: str, since: str, timeout_s: float) -> bytes | None:
        """See `Fleet.follow`."""
        return await self._call(lambda fleet: fleet.follow(gateway_id, since, timeout_s))

    async def statuses(self) -> bytes:
        """See `Fleet.statuses`."""

        async def read(fleet: Fleet) -> bytes:
            return fleet.statuses()

        return await self._call(read)

    async def report(self, gateway_id: str, demand: Mapping[str, Demand]) -> None:
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
    for part in pinned.parts:
        resolve_deployment(part, has_gpus=True)
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
