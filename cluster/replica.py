"""A replica: one scheduler and its tensor-parallel ranks, started together, watched and ended together."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..proto.channel import ChannelAddress
from ..proto.config import EngineConfig
from ..proto.errors import QuireError, ReplicaUnavailable
from ..scheduler.actor import SchedulerActor
from ..worker.actor import LoadReport, WorkerActor
from .channel_group import ChannelGroupMaker
from .closing import Closing
from .local_cluster import LocalCluster
from .ray_errors import await_all, unwrap
from .stopwatch import Stopwatch, seconds_in_words

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

__all__ = ["LocalCluster", "Replica", "num_actors", "start_replica"]

_PLACEMENT_TIMEOUT_S = 60.0
_PROCESS_TIMEOUT_S = 120.0
_LOAD_TIMEOUT_S = 1800.0
_STOP_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


def num_actors(tensor_parallel_size: int) -> int:
    """Actors of a replica: a scheduler and one a rank."""
    return 1 + tensor_parallel_size


class Replica(Closing):
    """A running replica.

    Attributes:
        config: with the number of KV blocks that every rank has.
        address: ZeroMQ endpoint where gateways reach the scheduler.
        failure: ends when the scheduler does: with the QuireError that it failed of, or None when it was closed.
            Whoever waits no longer may cancel it.
    """

    def __init__(self, config: EngineConfig, replica_id: str, address: str, actors: _Actors) -> None:
        self.config = config
        self.replica_id = replica_id
        self.address = address
        self._actors = actors
        self.failure: Future[QuireError | None] = Future()
        self._life: Future[None] = actors.scheduler.run.remote().future()
        self._life.add_done_callback(self._note_end)

    def close(self) -> None:
        """Ends every process of the replica; requests that still run end UNAVAILABLE. Safe to call twice."""
        self._actors.close(self._life)

    def _note_end(self, life: Future[None]) -> None:
        error = life.exception()
        failure = None if error is None else unwrap(error, f"the scheduler of {self.replica_id}")
        if self.failure.set_running_or_notify_cancel():  # false: nobody waits for it any more
            self.failure.set_result(failure)


def start_replica(config: EngineConfig, cluster: LocalCluster) -> Replica:
    """Starts a replica on the cluster; returns when it takes requests.

    Raises:
        ConfigError: the model cannot be loaded, or its KV cache does not fit.
        ReplicaUnavailable: a process died or was not ready in time; names it.
    """
    replica_id = f"replica-{secrets.token_hex(3)}"
    actors = _Actors(config, replica_id)
    try:
        stopwatch = Stopwatch()
        actors.create()
        cluster.guard()
        stopwatch.lap("processes")
        reports = actors.load()
        stopwatch.lap("load")
        config = config.with_num_blocks(min(report.num_blocks for report in reports))
        config = actors.allocate(config)
        stopwatch.lap("allocate")
        address = f"ipc://{cluster.directory}/{replica_id}"
        actors.connect(config, reports, ChannelAddress.in_directory(cluster.directory), address)
        stopwatch.lap("connect")
        _log.info("%s started: %s; slowest rank: %s", replica_id, stopwatch, _slowest(reports))
        return Replica(config, replica_id, address, actors)
    except BaseException:
        actors.close()
        raise


class _Actors:
    """The replica's processes, in one placement group: the scheduler and one worker a rank."""

    def __init__(self, config: EngineConfig, replica_id: str) -> None:
        self._config = config
        self._replica_id = replica_id
        self._placement: PlacementGroup | None = None
        self._all: list[ActorHandle] = []

    @property
    def scheduler(self) -> ActorHandle:
        return self._all[0]

    @property
    def _workers(self) -> list[ActorHandle]:
        return self._all[1:]

    def create(self) -> None:
        parallel = self._config.parallel
        gpu = {"GPU": 1} if parallel.device == "cuda" else {}
        bundles = [{"CPU": 1}] + [{"CPU": 1} | gpu] * parallel.tensor_parallel_size
        self._placement = placement_group(bundles, strategy="STRICT_PACK")
        if not self._placement.wait(_PLACEMENT_TIMEOUT_S):
            raise ReplicaUnavailable(f"no node had room for {bundles} in {_PLACEMENT_TIMEOUT_S:g} s")
        self._all.append(self._start(SchedulerActor, 0, {}, self._replica_id))
        for rank in range(parallel.tensor_parallel_size):
            self._all.append(self._start(WorkerActor, 1 + rank, gpu, self._config, rank))
        calls = {"the scheduler": self.scheduler.__ray_ready__.remote()} | self._call_workers("__ray_ready__")
        await_all(calls, _PROCESS_TIMEOUT_S, "starting its process")

    def load(self) -> list[LoadReport]:
        """Joins the ranks and loads the weights; the reports by rank."""
        store = None
        if len(self._workers) > 1:
            opening = {"rank 0": self._workers[0].open_store.remote(one_host=True)}
            (store,) = await_all(opening, _PROCESS_TIMEOUT_S, "opening its store")
        return await_all(self._call_workers("load", store), _LOAD_TIMEOUT_S, "loading")

    def allocate(self, config: EngineConfig) -> EngineConfig:
        """Has the ranks take their KV memory; the configuration comes back with the speed of the slowest's swap."""
        calls = self._call_workers("allocate", config.cache.num_blocks)
        return config.with_swap_rate(min(await_all(calls, _LOAD_TIMEOUT_S, "allocating its KV cache")))

    def connect(
        self, config: EngineConfig, reports: Sequence[LoadReport], channel: ChannelAddress, address: str
    ) -> None:
        """Has the scheduler join the ranks over the channel and listen to gateways at the address."""
        statuses = tuple(report.status for report in reports)
        make_group = ChannelGroupMaker(channel, tuple(self._workers), statuses, _PROCESS_TIMEOUT_S)
        call = self.scheduler.start.remote(config, make_group, address)
        await_all({"the scheduler": call}, 2 * _PROCESS_TIMEOUT_S, "joining the ranks")

    def close(self, life: Future[None] | None = None) -> None:
        """Ends the processes; `life` is the scheduler's, which is asked to end first."""
        if life is not None and not life.done():
            self.scheduler.stop.remote()
            with suppress(TimeoutError, RayError, QuireError):
                life.result(_STOP_TIMEOUT_S)
        for actor in self._all:
            ray.kill(actor)
        self._all = []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    def _start(self, kind: type, bundle: int, resources: dict[str, int], *arguments: Any) -> ActorHandle:
        # Two concurrent calls: run(), and what is asked meanwhile.
        options = ray.remote(kind).options(
            num_cpus=1,
            num_gpus=resources.get("GPU", 0),
            max_concurrency=2,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, bundle),
        )
        return options.remote(*arguments)

    def _call_workers(self, method: str, *arguments: Any) -> dict[str, ObjectRef]:
        workers = enumerate(self._workers)
        return {f"rank {rank}": getattr(worker, method).remote(*arguments) for rank, worker in workers}


def _slowest(reports: Sequence[LoadReport]) -> str:
    return seconds_in_words(max(reports, key=lambda report: sum(report.seconds.values())).seconds)
