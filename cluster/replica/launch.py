"""Launching a replica: room for its processes, the processes, weights and KV cache, and the lines between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...proto.config import EngineConfig
from ...proto.errors import ReplicaUnavailable
from ...scheduler.service.actor import WATCH_GROUP, SchedulerActor
from ...worker.actor import LoadReport, WorkerActor
from ..host.stopwatch import Stopwatch, seconds_in_words
from ..ray_runtime.errors import await_all
from ..ray_runtime.launch_target import LaunchTarget
from .channel_group import ChannelGroupMaker
from .launch_progress import LaunchProgress, LaunchStage, Tell
from .loading_bar import LoadingBar
from .placement import ClusterView, bundles_for, choose_strategy, explain
from .replica import Replica, ReplicaRecord, actor_name, placement_name, remove_replica

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_PROCESS_TIMEOUT_S = 120.0
_LOAD_TIMEOUT_S = 1800.0
_ANSWER_TIMEOUT_S = 5.0
# A replica whose placement takes longer tells why, and again after as long.
_EXPLAIN_AFTER_S = 10.0

_log = logging.getLogger(__name__)


def launch_replica(
    config: EngineConfig,
    replica_id: str,
    site: LaunchTarget,
    *,
    version: str = "",
    tell: Tell = lambda progress: None,
) -> Replica:
    """Starts a replica; returns when it takes requests. What it is at stands in the log, too.

    Args:
        tell: is told of every stage, and why there is no room as long as there is none. What it raises ends the
            launch.

    Raises:
        ConfigError: the model cannot be loaded, or its KV cache does not fit.
        ReplicaUnavailable: no room was found, or a process died or was not ready in time; says why, and names it.
    """
    launch = _Launch(config, replica_id, site, tell)
    try:
        stopwatch = Stopwatch()
        launch.place()
        stopwatch.lap("place")
        launch.create()
        site.guard()
        stopwatch.lap("processes")
        reports = launch.load()
        stopwatch.lap("load")
        config = launch.allocate(config.with_num_blocks(min(report.num_blocks for report in reports)))
        stopwatch.lap("allocate")
        endpoint = launch.connect(config, reports)
        stopwatch.lap("connect")
        launch.note(LaunchStage.STARTED, f"{stopwatch}; slowest rank: {_slowest(reports)}")
        record = launch.record(config, endpoint, version)
        return Replica(record, config, launch.scheduler)
    except BaseException:
        try:
            remove_replica(replica_id, site.namespace)
        except Exception:  # why the launch failed is what counts
            _log.exception("what there is of %s could not be removed", replica_id)
        raise


class _Launch:
    """The steps by which a replica's processes come to serve."""

    def __init__(self, config: EngineConfig, replica_id: str, site: LaunchTarget, tell: Tell) -> None:
        self._config = config
        self._replica_id = replica_id
        self._site = site
        self._tell = tell
        self._placement: PlacementGroup = PlacementGroup.empty()
        self._bundles = bundles_for(config, site.resources_per_rank)
        self._actors: list[ActorHandle] = []
        self._scheduler_host = ""
        # Of the scheduler and then of each rank.
        self._node_ids: tuple[str, ...] = ()
        self._pids: tuple[int, ...] = ()

    @property
    def scheduler(self) -> ActorHandle:
        return self._actors[0]

    @property
    def _workers(self) -> list[ActorHandle]:
        return self._actors[1:]

    def note(self, stage: LaunchStage, detail: object = "") -> None:
        """Tells the log, and whoever wants to know."""
        progress = LaunchProgress(stage, str(detail))
        _log.info("%s %s", self._replica_id, progress)
        self._tell(progress)

    def place(self) -> None:
        """Gets room for all processes; while there is none, tells why at intervals."""
        site, view = self._site, ClusterView.read(self._site.autoscaling_config)
        strategy = choose_strategy(self._bundles, view.nodes, view.node_types)
        self._placement = placement_group(
            self._bundles,
            strategy=strategy,
            name=placement_name(self._replica_id, site.namespace),
            lifetime="detached" if site.outlives_us else None,
        )
        # From here on, whoever ends the replica finds the placement; whoever did so before is heard now.
        self.note(LaunchStage.PLACING)
        deadline = time.monotonic() + site.placement_timeout_s
        while not self._placement.wait(max(0.0, min(_EXPLAIN_AFTER_S, deadline - time.monotonic()))):
            reason = explain(self._bundles, strategy, ClusterView.read(site.autoscaling_config))
            if self._state_of_placement() == "REMOVED":
                raise ReplicaUnavailable(f"{self._replica_id} was given up before it had a place: {reason}")
            if time.monotonic() >= deadline:
                raise ReplicaUnavailable(f"no room in {site.placement_timeout_s:g} s: {reason}")
            self.note(LaunchStage.WAITING_FOR_ROOM, reason)
        nodes = placement_group_table(self._placement)["bundles_to_node_id"]
        self._node_ids = tuple(nodes[bundle] for bundle in range(len(self._bundles)))

    def create(self) -> None:
        """Starts the processes."""
        size = self._config.parallel.tensor_parallel_size
        self.note(LaunchStage.STARTING, 1 + size)
        self._actors.append(self._start(SchedulerActor, "scheduler", 0, self._replica_id))
        for rank in range(size):
            self._actors.append(self._start(WorkerActor, f"rank-{rank}", 1 + rank, self._config, rank))
        calls = {"the scheduler": self.scheduler.where.remote()} | self._call_workers("status")
        (self._scheduler_host, pid), *ranks = await_all(calls, _PROCESS_TIMEOUT_S, "starting its process")
        self._pids = (pid, *(rank.pid for rank in ranks))

    def load(self) -> list[LoadReport]:
        """Joins the ranks and loads the weights; the reports by rank."""
        self.note(LaunchStage.LOADING, self._config.model.name)
        store = None
        if len(self._workers) > 1:
            one_host = len(set(self._node_ids[1:])) == 1
            creating = {"rank 0": self._workers[0].create_store.remote(one_host=one_host)}
            (store,) = await_all(creating, _PROCESS_TIMEOUT_S, "creating its store")
        with LoadingBar(len(self._workers)) as bar:
            watch = partial(self._show_bytes_read, bar) if bar.is_shown else None
            return await_all(self._call_workers("load", store), _LOAD_TIMEOUT_S, "loading", watch)

    def _show_bytes_read(self, bar: LoadingBar) -> None:
        # A rank that cannot answer is found out by the call that is waited for.
        with suppress(RayError):
            calls = self._call_workers("bytes_read")
            for rank, counts in enumerate(ray.get(list(calls.values()), timeout=_ANSWER_TIMEOUT_S)):
                bar.update(rank, *counts)

    def allocate(self, config: EngineConfig) -> EngineConfig:
        """Has the ranks take their KV memory; the configuration comes back with the speed of the slowest's swap."""
        calls = self._call_workers("allocate", config.cache.num_blocks)
        return config.with_swap_rate(min(await_all(calls, _LOAD_TIMEOUT_S, "allocating its KV cache")))

    def connect(self, config: EngineConfig, reports: Sequence[LoadReport]) -> str:
        """Has the scheduler join the ranks and listen to gateways; the endpoint for those."""
        host = self._scheduler_host
        statuses = tuple(report.status for report in reports)
        channel = self._site.channel(host)
        make_group = ChannelGroupMaker(channel, tuple(self._workers), statuses, _PROCESS_TIMEOUT_S)
        endpoint = self._site.mailbox(self._replica_id, host)
        call = self.scheduler.start.remote(config, make_group, endpoint, self._site.keys)
        (bound,) = await_all({"the scheduler": call}, 2 * _PROCESS_TIMEOUT_S, "joining the ranks")
        return str(bound)

    def record(self, config: EngineConfig, endpoint: str, version: str) -> ReplicaRecord:
        """How to find it again."""
        assert config.cache.num_blocks is not None
        return ReplicaRecord(
            replica_id=self._replica_id,
            model=config.model.name,
            version=version,
            endpoint=endpoint,
            num_kv_blocks=config.cache.num_blocks,
            namespace=self._site.namespace,
            node_ids=self._node_ids,
            pids=self._pids,
        )

    def _start(self, kind: type, role: str, bundle: int, *arguments: Any) -> ActorHandle:
        resources = dict(self._bundles[bundle])
        options: dict[str, Any] = {
            "name": actor_name(self._replica_id, role),
            "namespace": self._site.namespace,
            "lifetime": "detached" if self._site.outlives_us else None,
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            # What is asked while a long call runs: a rank's run, or a scheduler's start.
            "max_concurrency": 2,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement, bundle),
        }
        if kind is SchedulerActor:
            return ray.remote(concurrency_groups={WATCH_GROUP: 1})(kind).options(**options).remote(*arguments)
        return ray.remote(kind).options(**options).remote(*arguments)

    def _state_of_placement(self) -> str:
        return str(placement_group_table(self._placement).get("state", "REMOVED"))

    def _call_workers(self, method: str, *arguments: Any) -> dict[str, ObjectRef]:
        workers = enumerate(self._workers)
        return {f"rank {rank}": getattr(worker, method).remote(*arguments) for rank, worker in workers}


def _slowest(reports: Sequence[LoadReport]) -> str:
    return seconds_in_words(max(reports, key=lambda report: sum(report.seconds.values())).seconds)
