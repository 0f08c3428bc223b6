"""Launch of a replica: placement, processes, weights, KV cache, and the connections between the processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ....proto.config import EngineConfig
from ....proto.model.parallel_split import ParallelSplit
from ....worker import LoadReport, RankProcess, StartRecord, WeightOrigin, build_ops
from ...config.hub import download_model
from ..ray.errors import await_all
from ..ray.launch_target import LaunchTarget
from .launch_progress import LaunchProgress, LaunchStage, OnProgress
from .loading_bar import LoadingBar
from .placement import Reservation, bundles_for
from .process_starter import ProcessStarter
from .rank_lookup import find_copies, find_weights
from .rank_processes import LOAD_TIMEOUT_S, PROCESS_TIMEOUT_S, RankHandles
from .record import ReplicaRecord
from .replica import Replica, remove_replica
from .scheduler_start import start_serving
from .stopwatch import Stopwatch, format_seconds

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_PROFILE_TIMEOUT_S = 600.0
_ANSWER_TIMEOUT_S = 5.0
# A terabyte at 70 MB/s.
_DOWNLOAD_TIMEOUT_S = 4 * 3600.0

_log = logging.getLogger(__name__)


def launch_replica(
    config: EngineConfig,
    replica_id: str,
    target: LaunchTarget,
    *,
    version: str = "",
    peers: Sequence[str] = (),
    begin_load: Callable[[], Sequence[str]] = tuple,
    on_progress: OnProgress = lambda progress: None,
) -> Replica:
    """Start a replica and return it when it takes requests. Logs each stage.

    Args:
        peers: replicas that may have the same weights.
        begin_load: called when the ranks begin to load. Returns replicas that have begun to load the same files
            before, the latest first, from whose nodes' copies this one's are filled.
        on_progress: called on entry to every stage, and repeatedly with the reason while there is no room. An
            exception that it raises cancels the launch.

    Raises:
        ConfigError: the model cannot be loaded, or its KV cache does not fit.
        ReplicaUnavailable: there was no room in time (says why), or a process died or was late (names it).
    """
    launch = _Launch(config, replica_id, target, peers, begin_load, on_progress)
    try:
        stopwatch = Stopwatch()
        if not target.is_detached:
            build_ops(config)  # in this process, whose log shows at once what a first start waits for
        launch.place()
        stopwatch.lap("place")
        launch.fetch_model()
        stopwatch.lap("fetch")
        launch.start_processes()
        target.on_processes_started()
        stopwatch.lap("processes")
        reports = launch.load()
        stopwatch.lap("load")
        config = config.with_num_blocks(min(launch.profile()))
        stopwatch.lap("profile")
        config = launch.allocate(config)
        stopwatch.lap("allocate")
        launch.log_ranks()
        endpoint = launch.connect(config, reports)
        stopwatch.lap("connect")
        launch.log_seconds(stopwatch.laps)
        launch.report(LaunchStage.STARTED, f"{stopwatch}; slowest rank: {_slowest_seconds(reports)}")
        record = launch.record(config, endpoint, version)
        return Replica(record, config, launch.scheduler, launch.starter, target)
    except BaseException:
        try:
            remove_replica(replica_id, target.namespace)
        except Exception:  # the launch's own error is the one to raise
            _log.exception("the processes of %s could not be removed", replica_id)
        raise


class _Launch:
    """The steps of a launch, in the order of their methods."""

    def __init__(
        self,
        config: EngineConfig,
        replica_id: str,
        target: LaunchTarget,
        peers: Sequence[str],
        begin_load: Callable[[], Sequence[str]],
        on_progress: OnProgress,
    ) -> None:
        self._config = config
        self._peers, self._begin_load = peers, begin_load
        self._replica_id = replica_id
        self._target = target
        self._on_progress = on_progress
        self._bundles = bundles_for(config, target.resources_per_rank)
        self._reservation = Reservation(
            replica_id, self._bundles, ParallelSplit.of(config.parallel), target, self.report
        )
        self._actors: list[ActorHandle] = []
        self._scheduler_host = ""
        # The scheduler's first, then each rank's.
        self._node_ids: tuple[str, ...] = ()
        self._scheduler_pid = 0
        self._processes: tuple[RankProcess, ...] = ()  # by rank
        # node id |-> the configuration with the model's path on that node, where it differs.
        self._config_on: dict[str, EngineConfig] = {}

    @property
    def scheduler(self) -> ActorHandle:
        return self._actors[0]

    @property
    def _workers(self) -> list[ActorHandle]:
        return self._actors[1:]

    def report(self, stage: LaunchStage, detail: object = "") -> None:
        """Log the progress and pass it to `on_progress`."""
        progress = LaunchProgress(stage, str(detail))
        _log.info("%s %s", self._replica_id, progress)
        self._on_progress(progress)

    def place(self) -> None:
        """Reserve resources for all processes; while there are none, report why at intervals."""
        self._node_ids = self._reservation.reserve()

    def fetch_model(self) -> None:
        """Download a hub model on the ranks' nodes. On one host, `resolve` has downloaded it."""
        model = self._config.model
        if model.hub_id and self._target.is_detached:
            self.report(LaunchStage.DOWNLOADING, model.hub_id)
            self._config_on = _download_on_nodes(self._config, self._node_ids[1:])

    def start_processes(self) -> None:
        """Start the scheduler's process and the ranks'."""
        size = self._config.parallel.num_ranks
        self.report(LaunchStage.STARTING, 1 + size)
        self._actors.append(self.starter.start_scheduler())
        self._actors += (self.starter.start_rank(rank) for rank in range(size))
        calls = {"the scheduler": self.scheduler.where.remote()} | self._call_workers("process")
        (self._scheduler_host, self._scheduler_pid), *ranks = await_all(
            calls, PROCESS_TIMEOUT_S, "starting its process"
        )
        self._processes = tuple(ranks)

    def load(self) -> list[LoadReport]:
        """Connect the ranks to each other and load the weights; return the ranks' reports, by rank."""
        self.report(LaunchStage.LOADING, self._config.model.name)
        await_all(self._call_workers("build_ops"), LOAD_TIMEOUT_S, "compiling its C++ ops")
        store = None
        if len(self._workers) > 1:
            creating = {"rank 0": self._workers[0].create_store.remote(one_host=self._is_one_host)}
            (store,) = await_all(creating, PROCESS_TIMEOUT_S, "creating its store")
        with LoadingBar(len(self._workers)) as bar:
            watch = partial(self._show_bytes_read, bar) if bar.is_shown else None
            sources = self._weight_origins()
            loading = {
                f"rank {rank}": worker.load.remote(store, sources[rank])
                for rank, worker in enumerate(self._workers)
            }
            return await_all(loading, LOAD_TIMEOUT_S, "loading", watch)

    def _weight_origins(self) -> list[list[WeightOrigin]]:
        """Return for each rank other replicas' ranks that may have its weights, and nodes that copy the files."""
        num_ranks, namespace = len(self._workers), self._target.namespace
        over_network = self._target.is_detached
        origins: list[list[WeightOrigin]] = [[] for _ in range(num_ranks)]
        if over_network:
            leaders: dict[str, tuple[int, ActorHandle]] = {}
            for rank, node in enumerate(self._node_ids[1:]):
                leaders.setdefault(node, (rank, self._workers[rank]))
            earlier = list(dict.fromkeys([*self._begin_load(), *self._peers]))
            copies = find_copies(leaders, self._replica_id, earlier, namespace)
            origins = [[copies[node]] for node in self._node_ids[1:]]
        if self._config.parallel.weights_from_peers:
            found = find_weights(num_ranks, self._peers, namespace, over_network=over_network)
            origins = [[*own, *others] for own, others in zip(found, origins, strict=True)]
        return origins

    def profile(self) -> list[int]:
        """Return the number of KV blocks that fit into each rank's memory; every rank must have loaded."""
        return await_all(self._call_workers("profile"), _PROFILE_TIMEOUT_S, "profiling its memory")

    def _show_bytes_read(self, bar: LoadingBar) -> None:
        # The pending call to `load` reports a rank that does not answer.
        with suppress(RayError):
            calls = self._call_workers("bytes_read")
            for rank, counts in enumerate(ray.get(list(calls.values()), timeout=_ANSWER_TIMEOUT_S)):
                bar.update(rank, *counts)

    def allocate(self, config: EngineConfig) -> EngineConfig:
        """Allocate every rank's KV cache; return the configuration with the slowest rank's swap rates."""
        calls = self._call_workers("allocate", config.cache.num_kv_blocks)
        return config.with_swap_rates(await_all(calls, LOAD_TIMEOUT_S, "allocating its KV cache"))

    def log_ranks(self) -> None:
        """Log what the ranks have logged until now, for example which of their fast paths are off, and why."""
        calls = self._call_workers("take_start_log")
        log_start(self._replica_id, await_all(calls, PROCESS_TIMEOUT_S, "passing on its log"))

    def log_seconds(self, stages: Mapping[str, float]) -> None:
        """Log the seconds of the start by stage, with those of the slowest rank in each of a rank's stages."""
        calls = self._call_workers("start_seconds")
        ranks = await_all(calls, PROCESS_TIMEOUT_S, "passing on the seconds of its start")
        _log.info("%s: seconds to start\n%s", self._replica_id, start_table(stages, ranks))

    def connect(self, config: EngineConfig, reports: Sequence[LoadReport]) -> str:
        """Connect the scheduler to the ranks and start it; return its endpoint for gateways."""
        host = self._scheduler_host
        assert config.cache.num_kv_blocks is not None
        handles = RankHandles(
            tuple(self._workers),
            tuple(report.status for report in reports),
            self._processes,
            self.starter,
            config.cache.num_kv_blocks,
            self._is_one_host,
            ParallelSplit.of(config.parallel),
        )
        return start_serving(self.scheduler, host, config, handles, self._replica_id, self._target)

    def record(self, config: EngineConfig, endpoint: str, version: str) -> ReplicaRecord:
        """Return the record from which other processes find the replica."""
        assert config.cache.num_kv_blocks is not None
        return ReplicaRecord(
            replica_id=self._replica_id,
            model=config.model.name,
            version=version,
            endpoint=endpoint,
            num_kv_blocks=config.cache.num_kv_blocks,
            namespace=self._target.namespace,
            node_ids=self._node_ids,
            pids=(self._scheduler_pid, *(process.pid for process in self._processes)),
            device=config.parallel.device,
            dtype=config.model.dtype,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )

    @property
    def _is_one_host(self) -> bool:
        return len(set(self._node_ids[1:])) == 1

    @property
    def starter(self) -> ProcessStarter:
        return ProcessStarter(
            self._replica_id,
            self._target.namespace,
            self._reservation.group,
            tuple(self._bundles),
            tuple(self._config_on.get(node_id, self._config) for node_id in self._node_ids[1:]),
            self._node_ids,
            self._reservation.arrangement.bundle_of,
        )

    def _call_workers(self, method: str, *arguments: Any) -> dict[str, ObjectRef]:
        workers = enumerate(self._workers)
        return {f"rank {rank}": getattr(worker, method).remote(*arguments) for rank, worker in workers}


# stage of a launch |-> the stages of a rank within it.
_RANK_STAGES = {
    "processes": ("import",),
    "load": ("join", "weights", "compile"),
    "allocate": ("graphs", "warm up"),
}


def start_table(stages: Mapping[str, float], ranks: Sequence[Mapping[str, float]]) -> str:
    """Return a line for each stage of a launch, and one for each stage of the ranks within it.

    Args:
        stages: stage |-> seconds, in order.
        ranks: the seconds of each rank; a rank may lack stages.
    """
    lines = [f"{'stage':<12}{'seconds':>9}  slowest rank"]
    for stage, seconds in stages.items():
        lines.append(f"{stage:<12}{seconds:>9.2f}")
        for part in _RANK_STAGES.get(stage, ()):
            of_ranks = [(own[part], rank) for rank, own in enumerate(ranks) if part in own]
            if of_ranks:
                slowest_s, rank = max(of_ranks)
                lines.append(f"  {part:<10}{slowest_s:>9.2f}  {rank}")
    lines.append(f"{'total':<12}{sum(stages.values()):>9.2f}")
    return "\n".join(lines)


def _slowest_seconds(reports: Sequence[LoadReport]) -> str:
    return format_seconds(max(reports, key=lambda report: sum(report.seconds.values())).seconds)


def log_start(replica_id: str, records: Sequence[Sequence[StartRecord]]) -> None:
    """Log each record once, with the ranks that have logged it if these are not all.

    Args:
        records: the records of each rank.
    """
    ranks: dict[StartRecord, list[str]] = {}
    for rank, of_rank in enumerate(records):
        for record in dict.fromkeys(of_rank):
            ranks.setdefault(record, []).append(str(rank))
    for record, own in ranks.items():
        origin = replica_id
        if len(own) < len(records):
            origin += f", {'rank' if len(own) == 1 else 'ranks'} {', '.join(own)}"
        logging.getLogger(record.logger).log(record.level, "%s: %s", origin, record.message)


def _download_on_nodes(config: EngineConfig, node_ids: Iterable[str]) -> dict[str, EngineConfig]:
    """Download the model once on each node, with the tokens and into the cache of the node's environment.

    Args:
        config: its model is on the hub, pinned to a commit.

    Returns:
        node id |-> the configuration with the path of the files on that node.

    Raises:
        ModelLoadError: a download failed.
        ReplicaUnavailable: a node's process died, or did not finish in time; names the node.
    """
    nodes = list(dict.fromkeys(node_ids))
    calls = {
        f"node {node[:8]}": ray.remote(_download)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(config.model.hub_id, config.model.commit)
        for node in nodes
    }  # fmt: skip
    paths = await_all(calls, _DOWNLOAD_TIMEOUT_S, f"downloading {config.model.hub_id}")
    return {
        node: replace(config, model=replace(config.model, path=path))
        for node, path in zip(nodes, paths, strict=True)
    }


def _download(hub_id: str, commit: str) -> str:
    return str(download_model(hub_id, commit).path)
