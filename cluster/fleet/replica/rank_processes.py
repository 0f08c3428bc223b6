"""RankProcesses: the processes of a replica's ranks, which are started, loaded and, after a failure, replaced."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ....proto.errors import QuireError, ReplicaUnavailable
from ....proto.model.parallel_split import ONE_RANK, ParallelSplit
from ....proto.replica_status import RankStatus
from ....scheduler import KvTiers, Rebuilt
from ....worker import RankProcess, SegmentAddress
from ...os_utils.process_exit import ProcessExit, last_lines
from ..ray.errors import await_all, describe
from .process_starter import ProcessStarter, StandbyProcess
from .retained_memory import RetainedKv, RetainedWeights
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

# For a process to start: on two busy cores Python and torch take up to 13 s, on starved ones more than 45 s.
PROCESS_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 1800.0
# For the ranks that live to leave the group. A collective notices within 0.1 s that a rank has ended.
LEAVE_TIMEOUT_S = 3.0
# For a killed process to end, which writes nothing from then on.
_KILL_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankHandles:
    """The running and loaded ranks of a replica. Picklable.

    Attributes:
        workers: handles of the WorkerActors, by rank; None for a rank whose process has ended.
        statuses: after loading, by rank.
        processes: the process of each rank.
        starter: starts a rank again; None if ranks cannot be replaced.
        num_kv_blocks: blocks of the KV pool, with the scratch block.
        is_one_host: all ranks are on one host.
        split: how the ranks share the model.
    """

    workers: tuple[ActorHandle | None, ...]
    statuses: tuple[RankStatus, ...]
    processes: tuple[RankProcess, ...] = ()
    starter: ProcessStarter | None = None
    num_kv_blocks: int = 0
    is_one_host: bool = True
    split: ParallelSplit = ONE_RANK


class Rank:
    """One rank's process, as its scheduler sees it.

    Attributes:
        run: the call of its step loop; None before the first.
        is_usable: its process lives, has its weights and its KV memory, and executes no call.
        has_been_killed: its process is known to have ended after `kill`.
    """

    def __init__(self, worker: ActorHandle | None, status: RankStatus, process: RankProcess | None) -> None:
        self._worker = worker
        self.status = status
        self.run: Future[None] | None = None
        self.is_usable = worker is not None
        self._stderr = ""
        self.exit: ProcessExit | None = None
        self._raylet: ProcessExit | None = None
        self.has_been_killed = False
        if process is not None:
            self.watch(process)

    def watch(self, process: RankProcess) -> None:
        """Watch the rank's process, if it is on this host and has not ended."""
        if process.host == socket.gethostname():
            self._stderr = process.stderr
            with suppress(OSError):
                self.exit = ProcessExit(process.pid)
                self._raylet = ProcessExit(process.raylet_pid) if process.raylet_pid else None

    @property
    def worker(self) -> ActorHandle:
        assert self._worker is not None, f"rank {self.status.rank} has no process"
        return self._worker

    @property
    def has_stopped_process(self) -> bool:
        return self.exit is not None and self.exit.is_stopped

    @property
    def has_ended(self) -> bool:
        """Return whether the process is known to have ended. Without a raylet, Ray reports that 10 s later."""
        return self.exit is not None and self.exit.has_ended

    @property
    def lost_raylet(self) -> str:
        """The manager of its Ray node, if that process has ended; empty otherwise."""
        if self._raylet is None or not self._raylet.has_ended:
            return ""
        return f"its Ray node on {self.status.node} (raylet pid {self._raylet.pid})"

    @property
    def outlives_raylet(self) -> bool:
        """Return whether the process goes on, though Ray takes it for ended since its node's manager has."""
        return bool(self.lost_raylet) and not self.has_ended

    def describe_end(self, error: BaseException | None = None) -> str:
        """Return how the process ended, with the last lines that it printed.

        Args:
            error: the error of the call that ended with the process, if Ray has reported its end.
        """
        how = "its process ended" if error is None else describe(error)
        how = how if self.exit is None else self.exit.describe()
        how += f", after {lost} had died" if (lost := self.lost_raylet) else ""
        lines = last_lines(self._stderr) if self.exit is not None and self._stderr else ""
        return f"{how}; last lines of its stderr: {lines}" if lines else how

    def kill(self) -> None:
        if self._raylet is not None:
            self._raylet.close()
            self._raylet = None
        if self.exit is not None and not self.has_been_killed:
            self.exit.kill()  # Ray's own message is not read by a stopped process
            self.has_been_killed = self.exit.ends_within(_KILL_TIMEOUT_S)
            if self.has_been_killed:
                self.exit.close()
        if self._worker is not None:
            with suppress(RayError, ValueError):
                ray.kill(self._worker)


class RankProcesses:
    """The processes of one replica's ranks, in the process of its scheduler.

    Args:
        keeps_survivors: ranks whose process lives keep it, with their weights.
        check_open: raises to cancel a replacement.

    Attributes:
        split: how the ranks share the model.
    """

    def __init__(
        self,
        handles: RankHandles,
        *,
        keeps_survivors: bool = True,
        check_open: Callable[[], None] = lambda: None,
    ) -> None:
        processes: Sequence[RankProcess | None] = handles.processes or [None] * len(handles.workers)
        self.ranks = [Rank(*each) for each in zip(handles.workers, handles.statuses, processes, strict=True)]
        self._handles = handles
        self.split = handles.split
        self._keeps_survivors = keeps_survivors
        self._check_open = check_open
        self._spares = None if handles.starter is None else handles.starter.spare_processes()
        self._kv = RetainedKv()
        self._kept: RetainedWeights | None = None
        self._standby: StandbyProcess | None = None
        if handles.starter is not None and handles.starter.has_standby_weights:
            self._kept, self._standby = RetainedWeights(), StandbyProcess(handles.starter)

    def __len__(self) -> int:
        return len(self.ranks)

    def replace(self, failed: Iterable[int]) -> Rebuilt:
        """Replace failed ranks, and connect all of them in a new group. All rows are empty.

        Ranks that live keep their process, their weights and their KV memory. Ranks that do not leave the old group
        in time are replaced as well, and so are all ranks after an earlier attempt that did not connect them.

        Raises:
            QuireError: a rank cannot be started or loaded, or the ranks cannot be connected.
        """
        starter = self._handles.starter
        if starter is None:
            raise ReplicaUnavailable("these ranks cannot be replaced")
        # Ray moves the bundles of another node that is lost, but those of this process's node only once it ends.
        here = starter.node_ids[0]
        nearby = (each for each, node in zip(self.ranks, starter.node_ids[1:], strict=True) if node == here)
        lost = next(filter(None, (each.lost_raylet for each in nearby)), "")
        if lost:
            raise ReplicaUnavailable(f"no rank can be replaced: {lost} died, which would start the process")
        for rank in failed:
            self.ranks[rank].is_usable = False
            self.ranks[rank].kill()  # first: the others may wait for a stopped process in a collective
        stopwatch = Stopwatch()
        if self._keeps_survivors:
            self._leave()
        else:
            for each in self.ranks:
                each.is_usable = False
        stopwatch.lap("leave")
        replaced = [rank for rank, each in enumerate(self.ranks) if not each.is_usable]
        self._start(starter, replaced)
        stopwatch.lap("start")
        kept = self._connect(replaced, stopwatch)
        _log.warning("replaced ranks %s of %d: %s", replaced, len(self), stopwatch)
        return Rebuilt(has_new_ranks=bool(replaced), kept=kept)

    def replenish_spares(self) -> None:
        """Have spare processes started for those that replaced ranks, or that none was ready for; returns at once."""
        if self._spares is None:
            return
        if self._standby is None:
            self._spares.replenish()
        else:
            self._standby.prepare(then=self._spares.replenish)  # a standby takes a spare process

    def keep_weights(self) -> None:
        """Keep the weights that the ranks have in use now for processes that replace them; returns at once."""
        if self._kept is not None:
            self._kept.refresh([each.worker for each in self.ranks])

    def keep_kv(self) -> None:
        """Keep the KV memory of the ranks for processes that replace them, if it can outlive a process.

        Called once the ranks are connected; `replace` keeps that of new ranks.
        """
        if self._kept is None:
            return
        calls = {f"rank {rank}": each.worker.kv_segment.remote() for rank, each in enumerate(self.ranks)}
        addresses = self._await(calls, PROCESS_TIMEOUT_S, "naming its KV memory")
        for rank, address in enumerate(addresses):
            self._kv.keep(rank, address)

    def close(self) -> None:
        """Give up the weights and the KV that are kept. Safe to call twice."""
        self._kv.close()
        if self._kept is not None:
            self._kept.close()

    def _leave(self) -> None:
        """Let the ranks that live leave the group; those that do not are not usable."""
        usable = [each for each in self.ranks if each.is_usable]
        calls = [each.worker.leave.remote().future() for each in usable]
        wait_for_futures([*calls, *(each.run for each in usable if each.run)], LEAVE_TIMEOUT_S)
        for each, call in zip(usable, calls, strict=True):
            has_left = call.done() and call.exception() is None and (each.run is None or each.run.done())
            each.is_usable = has_left

    def _start(self, starter: ProcessStarter, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.ranks[rank].kill()
            if not self.ranks[rank].has_been_killed:
                self._kv.drop(rank)  # the process may still write to it
        for rank in ranks:
            worker = self._standby.take(rank) if self._standby else None
            self.ranks[rank] = Rank(worker or starter.start_rank(rank), self.ranks[rank].status, None)
            self.ranks[rank].is_usable = False  # not loaded yet
        calls = {f"rank {rank}": self.ranks[rank].worker.process.remote() for rank in ranks}
        for rank, process in zip(
            ranks, self._await(calls, PROCESS_TIMEOUT_S, "starting its process"), strict=True
        ):
            self.ranks[rank].watch(process)

    def _connect(self, replaced: Sequence[int], stopwatch: Stopwatch) -> KvTiers:
        """Join all ranks in a new group; load and allocate the replaced ones, whose collectives the others join.

        Returns:
            the memories whose content survived on all ranks.
        """
        store, survivors = self._create_store(), [rank for rank in range(len(self)) if rank not in replaced]
        for each in self.ranks:
            each.is_usable = False
        rejoining = {
            f"rank {rank}": self.ranks[rank].worker.rejoin.remote(store, has_new_ranks=bool(replaced))
            for rank in survivors
        }
        loading = {
            f"rank {rank}": self.ranks[rank].worker.load.remote(store, self._inherited(rank))
            for rank in replaced
        }
        self._await(loading, LOAD_TIMEOUT_S, "loading", rejoining)
        stopwatch.lap("load")
        count = self._handles.num_kv_blocks
        allocating = {
            f"rank {rank}": self.ranks[rank].worker.allocate_again.remote(count, self._kv.of_rank(rank))
            for rank in replaced
        }
        joined = self._await(allocating | rejoining, LOAD_TIMEOUT_S, "joining the group")
        calls = {f"rank {rank}": each.worker.status.remote() for rank, each in enumerate(self.ranks)}
        statuses = self._await(calls, PROCESS_TIMEOUT_S, "answering")
        for each, status in zip(self.ranks, statuses, strict=True):
            each.status, each.run, each.is_usable = status, None, True
        stopwatch.lap("join")
        segments = zip(replaced, joined[: len(replaced)], strict=True)
        are_kept = [self._kv.keep(rank, address) for rank, address in segments]
        return KvTiers.ALL if all(are_kept) else KvTiers.NONE

    def _inherited(self, rank: int) -> tuple[SegmentAddress, ...]:
        return () if self._kept is None else self._kept.of_rank(rank)

    def _create_store(self) -> tuple[str, int] | None:
        if len(self) == 1:
            return None
        call = self.ranks[0].worker.create_store.remote(one_host=self._handles.is_one_host)
        (store,) = self._await({"rank 0": call}, PROCESS_TIMEOUT_S, "creating its store")
        host, port = store
        return host, port

    def _await(
        self,
        calls: dict[str, ObjectRef],
        timeout_s: float,
        activity: str,
        others: dict[str, ObjectRef] | None = None,
    ) -> list[Any]:
        """Return the results of calls; raise as soon as one of them, or of `others`, fails."""

        def on_poll() -> None:
            self._check_open()
            if others:
                failed, _ = ray.wait(list(others.values()), num_returns=len(others), timeout=0)
                await_all({name: ref for name, ref in others.items() if ref in failed}, 1.0, activity)

        try:
            return await_all(calls, timeout_s, activity, on_poll) if calls else []
        except QuireError:
            raise
        except RayError as error:
            raise ReplicaUnavailable(f"{activity}: {describe(error)}") from error
