"""ProcessStarter and StandbyProcess: start the processes of a replica, at first and again after a failure."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....proto.config import EngineConfig
from ....scheduler import WATCH_GROUP, SchedulerActor
from ....worker import WorkerActor
from ..ray import compat
from .placement import Resources
from .rank_lookup import STANDBY_ROLE, actor_name

if TYPE_CHECKING:
    from ray.actor import ActorHandle


# For a raylet to answer. It asks every process of its node, and a stopped one answers late.
RAYLET_TIMEOUT_S = 5.0


class Raylets(Protocol):
    """Calls to the raylets of nodes; see `compat`."""

    def num_idle_processes(self, address: str, timeout_s: float) -> int: ...

    def start_idle_processes(self, address: str, count: int, timeout_s: float) -> None: ...


class SpareProcesses:
    """Keeps `count` idle processes on each of some nodes.

    The next actor that starts on such a node gets one of them: a process in which Python, Ray and, if the node was
    started with RAY_preload_python_modules, the modules of ranks and schedulers are loaded. Spares belong to nobody:
    the replicas of a node share them.

    Args:
        node_ids: Ray's ids of the nodes, which may contain duplicates.
        count: 0 keeps none.
        raylets: Ray's own unless a test gives others.
    """

    def __init__(self, node_ids: Iterable[str], count: int, raylets: Raylets = compat) -> None:
        self._node_ids = tuple(dict.fromkeys(node_ids))
        self._count = count
        self._raylets = raylets
        self._replenishing = threading.Lock()

    def replenish(self) -> None:
        """Have spare processes started where there are too few. Returns at once; a failure is logged."""
        if self._count and self._node_ids:
            threading.Thread(target=self._replenish_nodes, name="spare-processes", daemon=True).start()

    def _replenish_nodes(self) -> None:
        with self._replenishing:  # otherwise two threads would each start what is missing
            try:
                addresses = raylet_addresses(ray.nodes())
            except Exception as error:  # any, of a cluster that is shutting down
                _log.warning("no spare processes were started: the cluster's nodes are not known: %s", error)
                return
            for node_id in self._node_ids:
                if node_id in addresses:
                    self._replenish_node(addresses[node_id])

    def _replenish_node(self, address: str) -> None:
        try:
            missing = self._count - self._raylets.num_idle_processes(address, RAYLET_TIMEOUT_S)
            if missing > 0:
                self._raylets.start_idle_processes(address, missing, RAYLET_TIMEOUT_S)
        except grpc.RpcError as error:
            _log.warning("no spare processes were started on %s: %s", address, error)


def raylet_addresses(nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return node id |-> ``HOST:PORT`` of its raylet, for each live node of `ray.nodes()`."""
    return {
        node["NodeID"]: f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        for node in nodes
        if node["Alive"]
    }


# For Ray to free the name of a process that was killed.
_FREED_TIMEOUT_S = 5.0
_FREED_INTERVAL_S = 0.02
# For a standby to start, in the background.
_START_TIMEOUT_S = 120.0
# For a started standby to become a rank.
_ANSWER_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessStarter:
    """Starts a replica's processes. Picklable.

    Attributes:
        bundles: resources of the scheduler and then of each rank.
        configs: configuration of each rank, with the path of the model on its node.
        node_ids: nodes of the scheduler and then of each rank.
        bundle_of: index in the placement group of the bundle of the scheduler and then of each rank.
    """

    replica_id: str
    namespace: str
    placement: PlacementGroup
    bundles: tuple[Resources, ...]
    configs: tuple[EngineConfig, ...]
    node_ids: tuple[str, ...]
    bundle_of: tuple[int, ...]

    def spare_processes(self) -> SpareProcesses:
        """Return the spare processes of the replica's nodes."""
        return SpareProcesses(self.node_ids, self.configs[0].parallel.spare_processes)

    @property
    def has_standby_weights(self) -> bool:
        """Return whether ranks keep their weights for the processes that replace them."""
        return self.configs[0].parallel.standby_weights

    def start_scheduler(self) -> ActorHandle:
        """Start the scheduler's process; its actor is ready later."""
        kind = ray.remote(concurrency_groups={WATCH_GROUP: 1})(SchedulerActor)
        return self._start(kind, "scheduler", 0, self.replica_id)

    def start_rank(self, rank: int) -> ActorHandle:
        """Start a rank's process; its actor is ready later."""
        return self._start(ray.remote(WorkerActor), f"rank-{rank}", 1 + rank, self.configs[rank], rank)

    def start_standby(self) -> ActorHandle:
        """Start a process on the scheduler's node that becomes a rank later; its actor is ready later.

        It takes no resources: as a rank it uses those that the failed one had.
        """
        role = f"{STANDBY_ROLE}{secrets.token_hex(4)}"
        return self._start(ray.remote(WorkerActor), role, 0, self.configs[0], None, is_standby=True)

    def _start(
        self, kind: Any, role: str, process: int, *arguments: Any, is_standby: bool = False
    ) -> ActorHandle:
        resources = {"CPU": 0.0} if is_standby else dict(self.bundles[process])
        options: dict[str, Any] = {
            "name": actor_name(self.replica_id, role),
            "namespace": self.namespace,
            # Otherwise the ranks would end with a scheduler that dies: Ray ends an actor with its last handle.
            "lifetime": "detached",
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            # One call may be long, a rank's run or a scheduler's start; short queries need the second thread.
            "max_concurrency": 2,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.placement, self.bundle_of[process]),
        }
        return _once_free(lambda: kind.options(**options).remote(*arguments))


def _once_free(start: Callable[[], ActorHandle]) -> ActorHandle:
    """Start an actor whose name may still be that of a process that was killed just now."""
    deadline = time.monotonic() + _FREED_TIMEOUT_S
    while True:
        try:
            return start()
        except ValueError:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(_FREED_INTERVAL_S)


class StandbyProcess:
    """At most one process that was started before a rank fails, and becomes that rank. On the scheduler's node.

    Methods may be called on any thread.

    A rank that it becomes waits for no process: Ray takes 0.3 to 0.8 s to make an actor of a spare one.
    """

    def __init__(self, starter: ProcessStarter) -> None:
        self._starter = starter
        self._lock = threading.Lock()
        self._ready: ActorHandle | None = None
        self._is_starting = False

    def prepare(self, then: Callable[[], None]) -> None:
        """Have a process started if there is none, and call `then`, on a thread; a failure is logged."""
        with self._lock:
            is_due = self._ready is None and not self._is_starting
            self._is_starting = self._is_starting or is_due
        threading.Thread(target=self._prepare, args=(is_due, then), name="standby", daemon=True).start()

    def take(self, rank: int) -> ActorHandle | None:
        """Return the process, which is the rank now; None if there is none, or the rank is on another node."""
        starter = self._starter
        if starter.node_ids[1 + rank] != starter.node_ids[0]:
            return None
        with self._lock:
            process, self._ready = self._ready, None
        if process is None:
            return None
        try:
            ray.get(process.take_place.remote(starter.configs[rank], rank), timeout=_ANSWER_TIMEOUT_S)
        except RayError as error:
            _log.warning("the standby did not become rank %d: %s", rank, error)
            _end(process)
            return None
        return process

    def _prepare(self, is_due: bool, then: Callable[[], None]) -> None:
        if is_due:
            process = self._start()
            with self._lock:
                self._ready, self._is_starting = process, False
        then()

    def _start(self) -> ActorHandle | None:
        process = None
        try:
            process = self._starter.start_standby()
            ray.get(process.process.remote(), timeout=_START_TIMEOUT_S)
        except Exception as error:  # any, of a cluster that is shutting down
            _log.warning("no standby process was started: %s", error)
            _end(process)
            return None
        return process


def _end(process: ActorHandle | None) -> None:
    if process is not None:
        with suppress(RayError, ValueError):
            ray.kill(process)
