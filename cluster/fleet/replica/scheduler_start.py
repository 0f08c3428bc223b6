"""Start of a scheduler's step loop, in a new replica or in place of a scheduler that ended."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from ....proto.config import EngineConfig
from ....proto.errors import ReplicaUnavailable
from ....proto.model.parallel_split import ParallelSplit
from ....proto.replica_status import RankStatus
from ....worker import RankProcess
from ..ray.errors import await_all
from ..ray.launch_target import LaunchTarget
from .channel_group import ChannelGroupFactory
from .process_starter import ProcessStarter
from .rank_lookup import end_standbys, find_rank
from .rank_processes import LOAD_TIMEOUT_S, PROCESS_TIMEOUT_S, RankHandles
from .replica import Replica
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# For a rank that was idle or in a step to answer.
_ANSWER_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


def start_serving(
    scheduler: ActorHandle,
    host: str,
    config: EngineConfig,
    handles: RankHandles,
    endpoint_name: str,
    target: LaunchTarget,
    *,
    is_takeover: bool = False,
) -> str:
    """Connect a scheduler to loaded ranks and start its step loop; return its endpoint for gateways.

    Args:
        host: address of the scheduler's node.
        endpoint_name: distinguishes the endpoints of one host.
        is_takeover: see ChannelGroupFactory.
    """
    make_group = ChannelGroupFactory(
        target.channel_address(host),
        handles,
        PROCESS_TIMEOUT_S,
        keeps_survivors=not config.parallel.fused_all_reduce,
        is_takeover=is_takeover,
    )
    endpoint = target.mailbox_endpoint(endpoint_name, host)
    call = scheduler.start.remote(config, make_group, endpoint, target.keys)
    timeout_s = LOAD_TIMEOUT_S if is_takeover else 2 * PROCESS_TIMEOUT_S
    (bound,) = await_all({"the scheduler": call}, timeout_s, "joining the ranks")
    return str(bound)


def replace_scheduler(replica: Replica, number: int) -> Replica:
    """Start a new scheduler for a replica whose scheduler has ended or does not answer.

    The ranks that live keep their process and their weights; the others are replaced.

    Args:
        number: number of the new scheduler, from 2.

    Raises:
        QuireError: a process could not be started, or the ranks could not be connected. In a fleet also if no rank
            answers: then the replica's node has probably failed, and another replica is ready sooner.
    """
    starter, target = replica.starter, replica.target
    if starter is None or target is None:
        raise ReplicaUnavailable(f"{replica.replica_id} was launched by another process")
    lost_raylet = replica.lost_raylet
    stopwatch = Stopwatch()
    replica.kill_scheduler()
    if lost_raylet:
        raise ReplicaUnavailable(f"{lost_raylet} died, which would start the process")
    workers = [_find_rank(starter, rank) for rank in range(replica.record.num_ranks)]
    handles = _rank_handles(replica, starter, workers)
    if target.is_detached and not any(handles.workers):
        raise ReplicaUnavailable(f"no rank of {replica.replica_id} answers")
    end_standbys(replica.replica_id, starter.namespace)
    stopwatch.lap("find ranks")
    scheduler = starter.start_scheduler()
    stopwatch.lap("ask for a process")
    calls = {"the scheduler": scheduler.where.remote()}
    ((host, pid),) = await_all(calls, PROCESS_TIMEOUT_S, "starting its process")
    target.on_processes_started()
    stopwatch.lap("start")
    endpoint = start_serving(
        scheduler,
        host,
        replica.config,
        handles,
        f"{replica.replica_id}.{number}",
        target,
        is_takeover=True,
    )
    stopwatch.lap("join")
    _log.info("%s has a new scheduler: %s", replica.replica_id, stopwatch)
    record = replace(replica.record, endpoint=endpoint, pids=(pid, *replica.record.pids[1:]))
    return Replica(record, replica.config, scheduler, starter, target)


def _find_rank(starter: ProcessStarter, rank: int) -> ActorHandle | None:
    with suppress(ValueError):
        return find_rank(starter.replica_id, rank, starter.namespace)
    return None


def _rank_handles(
    replica: Replica, starter: ProcessStarter, workers: list[ActorHandle | None]
) -> RankHandles:
    """Return the ranks; those that do not answer, or that the last scheduler was starting, count as ended."""
    with ThreadPoolExecutor(len(workers)) as pool:
        found = list(pool.map(_ask, range(len(workers)), workers))
    assert replica.config.cache.num_kv_blocks is not None
    return RankHandles(
        tuple(worker if process.pid else None for worker, (_, process) in zip(workers, found, strict=True)),
        tuple(status for status, _ in found),
        tuple(process for _, process in found),
        starter,
        replica.config.cache.num_kv_blocks,
        len(set(replica.record.node_ids[1:])) == 1,
        ParallelSplit.of(replica.config.parallel),
    )


def _ask(rank: int, worker: ActorHandle | None) -> tuple[RankStatus, RankProcess]:
    """Return a rank's status and process; those of no process if it does not answer, or was replacing another one."""
    if worker is not None:
        with suppress(RayError):
            status, process = ray.get(
                [worker.status.remote(), worker.process.remote()], timeout=_ANSWER_TIMEOUT_S
            )
            if process.is_loaded:
                return status, process
        with suppress(RayError, ValueError):
            ray.kill(worker)
    return RankStatus(rank, 0, "", "", "ended"), RankProcess(0, "")
