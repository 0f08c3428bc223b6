"""ProcessStarter: starts the processes of a replica in its placement group, at first and again after a failure."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....proto.config import EngineConfig
from ....scheduler.service.actor import WATCH_GROUP, SchedulerActor
from ....worker.rank.actor import WorkerActor
from ..ray.spare_processes import SpareProcesses
from .placement import Resources
from .replica_names import STANDBY_ROLE, actor_name

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# For Ray to free the name of a process that was killed.
_FREED_TIMEOUT_S = 5.0
_FREED_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessStarter:
    """Starts a replica's processes. Picklable.

    Attributes:
        bundles: resources of the scheduler and then of each rank, as in the placement group.
        configs: of each rank, with the path of the model on its node.
        node_ids: nodes of the scheduler and then of each rank.
    """

    replica_id: str
    namespace: str
    placement: PlacementGroup
    bundles: tuple[Resources, ...]
    configs: tuple[EngineConfig, ...]
    node_ids: tuple[str, ...]

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
        self, kind: Any, role: str, bundle: int, *arguments: Any, is_standby: bool = False
    ) -> ActorHandle:
        resources = {"CPU": 0.0} if is_standby else dict(self.bundles[bundle])
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
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.placement, bundle),
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
