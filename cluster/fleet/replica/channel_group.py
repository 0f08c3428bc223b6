"""ChannelWorkerGroup: ranks behind a StepChannel. Ray carries no step; it starts processes and reports their deaths.

A group has *lives*: from one connection of all its ranks to the failure of one of them. Each life has a channel of
its own, so that no frame of an earlier life can arrive.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import ray
from ray.exceptions import RayError

from ....proto.errors import RankFailed, ReplicaUnavailable
from ....proto.kv_transfer import KvReport
from ....proto.lora import LoraReport
from ....proto.model.parallel_split import ParallelSplit
from ....proto.replica_status import RankStatus
from ....proto.step import COLLECTIVES, EncoderInput, StepFailure, StepPlan, StepResult, decode_reply
from ....proto.stored_kv import StoredReport
from ....proto.transport.channel import ChannelAddress, StepSender
from ....scheduler import KvTiers, Rebuilt
from .examination import Examination
from .rank_processes import Rank, RankHandles, RankProcesses

_log = logging.getLogger(__name__)

# Seconds to wait for the root cause of a failure. One rank's death fails the collectives of the others, whose reports
# come first: Ray reports a killed process 12 to 29 ms later.
_ROOT_CAUSE_WAIT_S = 0.3
_UNCHANGED = Rebuilt(has_new_ranks=False, kept=KvTiers.ALL)
# Weight of the latest step in the mean of recent ones.
_RECENT = 0.05
# A rank is slow that computes so many times as long as its peers, over so many steps.
SLOW = 3.0
_STEPS_TO_JUDGE = 20
# Begin of the reason in a rank's report that a collective failed: another rank is the cause.
_COLLECTIVE_FAILED = "ConnectionError"
# Spare processes start once no step was computed for this long,
IDLE_S = 2.0
# or, in a group that is never idle, this long after its first step.
BUSY_S = 60.0


@dataclass(frozen=True, slots=True)
class ChannelGroupFactory:
    """Makes the group in the process that calls it. It is picklable; the group's sockets are not.

    Attributes:
        address: where to bind the step channel.
        handles: the ranks.
        join_timeout_s: limit of the time in which every rank must join the channel.
        keeps_survivors: see RankProcesses.
        is_takeover: the ranks served another scheduler, which has ended: they are connected anew first.
    """

    address: ChannelAddress
    handles: RankHandles
    join_timeout_s: float
    keeps_survivors: bool = True
    is_takeover: bool = False

    def __call__(self) -> ChannelWorkerGroup:
        return ChannelWorkerGroup(self)


class ChannelWorkerGroup:
    """A WorkerGroup; see scheduler.service.worker_group for its methods."""

    def __init__(self, factory: ChannelGroupFactory) -> None:
        self._address = factory.address
        self._join_timeout_s = factory.join_timeout_s
        self._closed = self._is_rebuilding = False
        self._rebuilt = _UNCHANGED  # by attempts to rebuild the group that failed later
        self._clock = SparesClock()
        self._ranks = RankProcesses(
            factory.handles, keeps_survivors=factory.keeps_survivors, check_open=self._check_open
        )
        if factory.is_takeover:
            self._ranks.replace(())
        self._life = _Epoch(self._ranks, self._address, self._join_timeout_s, epoch=1)
        self._command_step = 0  # of the latest command, which may change the weights
        self._ranks.keep_kv()
        self._ranks.keep_weights()

    def broadcast(self, plan: StepPlan) -> None:
        if plan.command is not None:
            self._command_step = plan.step_id
        self._life.broadcast(plan)

    def send_media(self, image: EncoderInput) -> None:
        self._life.send_media(image)

    def gather(self, timeout_s: float) -> StepResult | None:
        result = self._life.gather(timeout_s)
        if result is not None:
            self._note_step(result)
        return result

    def examine(self, waited_s: float, *, failed_s: float) -> None:
        self._life.examine(waited_s, failed_s=failed_s)

    def check(self) -> None:
        self._life.check()
        if self._clock.note_idle(time.monotonic()):
            self._ranks.replenish_spares()

    def statuses(self) -> tuple[RankStatus, ...]:
        if self._is_rebuilding:
            return tuple(replace(each.status, stage="recovering") for each in self._ranks.ranks)
        return self._life.statuses()

    def rebuild(self, epoch: int) -> Rebuilt:
        self._is_rebuilding = True
        failed = self._life.failed_ranks
        self._life.close()
        attempt = self._ranks.replace(failed)
        has_new_ranks = self._rebuilt.has_new_ranks or attempt.has_new_ranks
        self._rebuilt = Rebuilt(has_new_ranks, self._rebuilt.kept & attempt.kept)
        self._check_open()
        self._life = _Epoch(self._ranks, self._address, self._join_timeout_s, epoch)
        self._clock = SparesClock()
        self._is_rebuilding = False
        self._ranks.keep_weights()
        rebuilt, self._rebuilt = self._rebuilt, _UNCHANGED
        return rebuilt

    def close(self) -> None:
        self._closed = True
        self._life.close()
        self._ranks.close()

    def _note_step(self, result: StepResult) -> None:
        if self._clock.note_step(time.monotonic()):
            self._ranks.replenish_spares()
        if result.step_id == self._command_step:
            self._ranks.keep_weights()

    def _check_open(self) -> None:
        if self._closed:
            raise ReplicaUnavailable("the replica is shutting down")


class StageTimes:
    """Recent times of a rank's steps: its own work, its collectives, and how long it waited for other stages.

    Attributes:
        compute_s: per step, without collectives: a rank that waits for a slow one does so in a collective.
        num_steps: the number of steps that were noted.
    """

    def __init__(self) -> None:
        self.compute_s = self.await_s = 0.0
        self.collective_s: dict[str, float] = {}
        self.num_steps = 0

    def note(self, stage_times: Mapping[str, float]) -> None:
        """Note a step, by its StepResult.stage_times."""
        stages_s = sum(stage_times.get(name, 0.0) for name in ("apply", "forward", "sample"))
        own = {kind: stage_times[kind] for kind in COLLECTIVES if kind in stage_times}
        share = _RECENT if self.num_steps else 1.0
        self.num_steps += 1
        self.compute_s += share * (stages_s - sum(own.values()) - self.compute_s)
        self.await_s += share * (stage_times.get("await", 0.0) - self.await_s)
        for kind in {*own, *self.collective_s}:
            before = self.collective_s.get(kind, 0.0)
            self.collective_s[kind] = before + share * (own.get(kind, 0.0) - before)

    def __str__(self) -> str:
        return f"computes {1e3 * self.compute_s:.1f} ms per step, awaits others {1e3 * self.await_s:.1f} ms"

    def describe(self, slowness: float) -> str:
        """Return the times in words; empty before the first step.

        Args:
            slowness: as find_slow returns it; 0 if the rank is not slow.
        """
        if not self.num_steps:
            return ""
        parts = [f"computes {1e3 * self.compute_s:.1f} ms per step"]
        parts += [f"{kind} {1e3 * self.collective_s[kind]:.1f} ms" for kind in sorted(self.collective_s)]
        parts += [f"transfers {1e3 * self.await_s:.1f} ms"] if self.await_s else []
        parts += [f"{slowness:.1f} times as long as its peers"] if slowness else []
        return ", ".join(parts)


def find_slow(times: Sequence[StageTimes], split: ParallelSplit) -> dict[int, float]:
    """Return the ranks that compute SLOW times as long as their peers or longer.

    Peers share a stage; with one rank per stage they are the other stages, which have as much work.

    Returns:
        rank |-> its time as a multiple of its peers' median.
    """
    slow: dict[int, float] = {}
    for rank, own in enumerate(times):
        stage = split.ranks_of(split.place_of(rank).stage) if split.tensor > 1 else range(len(times))
        peers = [times[other].compute_s for other in stage if other != rank and times[other].num_steps]
        usual_s = statistics.median(peers) if peers else 0.0
        if own.num_steps >= _STEPS_TO_JUDGE and usual_s and own.compute_s >= SLOW * usual_s:
            slow[rank] = own.compute_s / usual_s
    return slow


class _Epoch:
    """One life of the group.

    Attributes:
        failed_ranks: ranks that are known to be dead or hung, or to have lost their GPU.
    """

    def __init__(
        self, processes: RankProcesses, address: ChannelAddress, join_timeout_s: float, epoch: int
    ) -> None:
        self.failed_ranks: set[int] = set()
        self._ranks, self._split = processes.ranks, processes.split
        self._epoch = epoch
        self._sender = StepSender(address.of_epoch(epoch), len(self._ranks))
        self._broadcast_step = 0
        # rank |-> step of its latest reply; replies are in order
        self._replied_steps = [0] * len(self._ranks)
        self._results: deque[StepResult] = deque()  # with the tokens, not gathered yet
        self._gathered_step = 0
        self._times = [StageTimes() for _ in self._ranks]  # of steps, by rank
        self._named_slow: set[int] = set()  # ranks that the log has named
        self._lora_reports: list[LoraReport] = []  # of other ranks, not gathered yet
        self._kv_reports: list[KvReport] = []
        self._stored_reports: list[StoredReport] = []  # of other ranks, not gathered yet
        self._failures: list[StepFailure] = []  # reported by the ranks, in order of arrival
        self._deaths: dict[int, str] = {}  # rank |-> how its process ended; written by Ray's thread
        self._examination: Examination | None = None
        self._closed = False
        try:
            self._start(join_timeout_s)
        except BaseException:
            self.close()
            raise

    def _start(self, join_timeout_s: float) -> None:
        for rank, each in enumerate(self._ranks):
            # The future of run() is done when the rank's process ends, for any reason.
            run: Future[None] = each.worker.run.remote(self._sender.address).future()
            each.run = run
            run.add_done_callback(partial(self._on_rank_end, rank))
        self._sender.wait_for_ranks(join_timeout_s)
        self.check()

    def broadcast(self, plan: StepPlan) -> None:
        if not self._broadcast_step:  # step ids go on from the life before
            self._gathered_step = plan.step_id - 1
            self._replied_steps = [self._gathered_step] * len(self._ranks)
        self._broadcast_step = plan.step_id
        self._sender.send(plan.encode())

    def send_media(self, image: EncoderInput) -> None:
        self._sender.send(image.encode())

    def gather(self, timeout_s: float) -> StepResult | None:
        deadline = time.monotonic() + timeout_s
        while not self._results:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            self._on_frame(self._sender.receive(remaining_s))
            self._raise_failure()
        result = self._results.popleft()
        self._gathered_step = result.step_id
        self._examination = None
        if self._lora_reports:
            reports, self._lora_reports = (*result.lora_reports, *self._lora_reports), []
            result = replace(result, lora_reports=reports)
        if self._kv_reports:
            kv_reports, self._kv_reports = (*result.kv_reports, *self._kv_reports), []
            result = replace(result, kv_reports=kv_reports)
        if self._stored_reports:
            news, self._stored_reports = (*result.stored_reports, *self._stored_reports), []
            result = replace(result, stored_reports=news)
        return result

    def examine(self, waited_s: float, *, failed_s: float) -> None:
        step_id = self._gathered_step + 1
        late = [rank for rank, replied in enumerate(self._replied_steps) if replied < step_id]
        self._raise_ended(late)
        # A rank whose process is stopped blocks the others in a collective, so it is named first.
        for rank in late:
            if self._ranks[rank].has_stopped_process:
                raise self._hung(
                    rank, f"its process{self._on_node(rank)} is stopped and does not answer", waited_s
                )
        if self._examination is None:
            self._examination = Examination(self._ask, failed_s)
        if failed := self._examination.find_failed(late, waited_s):
            self._raise_late(failed, late, self._examination.stages, waited_s)

    def _ask(self, ranks: Sequence[int]) -> _StatusCalls:
        return _StatusCalls({rank: self._ranks[rank].worker for rank in ranks})

    def _raise_late(
        self, failed: list[int], late: list[int], stages: Mapping[int, str], waited_s: float
    ) -> None:
        rank = failed[0]
        others = ", ".join(f"rank {other} in stage {stages.get(other)}" for other in late if other != rank)
        stage = self._split.describe(rank)
        silence = f"; it is {stage}" if stage else ""
        silence += "" if rank in stages else f"; its process{self._on_node(rank)} does not answer either"
        waiting = f" (also without an answer: {others})" if others else ""
        self.failed_ranks |= set(failed)
        problem = f"no answer in {waited_s:.1f} s{silence}{waiting}"
        raise RankFailed(rank, problem, self._gathered_step + 1, stages.get(rank))

    def _hung(self, rank: int, problem: str, waited_s: float) -> RankFailed:
        self.failed_ranks.add(rank)
        return RankFailed(rank, f"no answer in {waited_s:.1f} s; {problem}", self._gathered_step + 1)

    def check(self) -> None:
        while (frame := self._sender.receive(0)) is not None:
            self._on_frame(frame)
        self._raise_failure()
        self._raise_ended(range(len(self._ranks)))

    def _raise_ended(self, ranks: Iterable[int]) -> None:
        """Raise RankFailed for a rank whose process has ended, although Ray has not reported it yet."""
        for rank in ranks:
            if self._ranks[rank].has_ended:
                self.failed_ranks.add(rank)
                reason = self._ranks[rank].describe_end() + self._on_node(rank)
                raise RankFailed(rank, reason, self._step_in_flight, self._stage_of_step)

    def statuses(self) -> tuple[RankStatus, ...]:
        slow = find_slow(self._times, self._split) if len(self._ranks) > 1 else {}
        for rank in slow.keys() - self._named_slow:
            _log.warning(
                "rank %d is slow%s: %s", rank, self._on_node(rank), self._times[rank].describe(slow[rank])
            )
        self._named_slow = set(slow)
        return tuple(
            replace(each.status, stage=self._stage_of(each, step_id), times=self._times_of(number, slow))
            for number, (each, step_id) in enumerate(zip(self._ranks, self._replied_steps, strict=True))
        )

    def _times_of(self, rank: int, slow: Mapping[int, float]) -> str:
        return self._times[rank].describe(slow.get(rank, 0.0)) if len(self._ranks) > 1 else ""

    def _stage_of(self, rank: Rank, replied_step: int) -> str:
        stage = "idle" if replied_step >= self._broadcast_step else "step"
        number = rank.status.rank
        if layers := self._split.describe(number):
            stage += f"; {layers}: {self._times[number]}"
        return f"{stage}; {lost} died" if (lost := rank.lost_raylet) else stage

    def close(self) -> None:
        self._closed = True
        self._sender.close()

    def _on_frame(self, frame: bytes | None) -> None:
        if frame is None:
            return
        reply = decode_reply(frame)
        if isinstance(reply, StepFailure):
            self._failures.append(reply)
        elif reply.epoch == self._epoch:
            self._replied_steps[reply.rank] = reply.step_id
            self._times[reply.rank].note(reply.stage_times)
            if reply.rank == self._split.result_rank:
                self._results.append(reply)
            else:
                self._lora_reports += reply.lora_reports
                self._kv_reports += reply.kv_reports
                self._stored_reports += reply.stored_reports

    def _on_rank_end(self, rank: int, end: Future[None]) -> None:
        """Record a process that died, on a thread of Ray's. A rank whose run() returned has sent its own reason."""
        error = end.exception()
        if error is None or self._closed:
            return
        if self._ranks[rank].outlives_raylet:
            _log.error("rank %d goes on, though %s died", rank, self._ranks[rank].lost_raylet)
            return
        self._deaths[rank] = self._ranks[rank].describe_end(error)
        self.failed_ranks.add(rank)
        self._sender.interrupt()

    def _raise_failure(self) -> None:
        """Raise RankFailed for the rank that failed first, if any rank has failed."""
        if not self._failures and not self._deaths:
            return
        # One failure is reported by all ranks. A rank that dies takes the collective with it that the others are in:
        # they report a ConnectionError within milliseconds, while Ray needs 12 to 29 ms to notice the death. To name
        # the first report as the cause would name a healthy rank, replace it, and leave the group broken. So this
        # waits a moment, until a death or the reports of all ranks are there, and then takes, in this order:
        # 1. a process that ended: it cannot be a consequence, since no rank ends because another one has;
        # 2. a rank without a report whose process is stopped (SIGSTOP, a debugger): it is not dead, so that nothing
        #    reports it, and the others ran into their deadline because of it;
        # 3. the first report of a rank's own exception. It is also a step error, for which the scheduler suspects the
        #    requests of the step at once; after a death it does so only if they were in an earlier failure too;
        # 4. the first report of a failed collective, if there is nothing else.
        self._await_root_cause()
        if self._deaths:
            rank, reason = next(iter(self._deaths.items()))
            raise RankFailed(rank, reason + self._on_node(rank), self._step_in_flight, self._stage_of_step)
        lost = [failure for failure in self._failures if failure.ends_rank]
        self.failed_ranks |= {failure.rank for failure in lost}
        failed = {failure.rank for failure in self._failures}
        for rank in set(range(len(self._ranks))) - failed:
            if self._ranks[rank].has_stopped_process:
                self.failed_ranks.add(rank)
                raise RankFailed(
                    rank, f"its process{self._on_node(rank)} does not answer", self._step_in_flight
                )
        own = [each for each in self._failures if not each.reason.startswith(_COLLECTIVE_FAILED)]
        first = (lost or own or self._failures)[0]
        raise RankFailed(
            first.rank, first.reason, first.step_id or None, first.stage, is_step_error=bool(own) and not lost
        )

    def _await_root_cause(self) -> None:
        """Wait a moment for the report of the rank that failed first, or of its process."""
        deadline = time.monotonic() + _ROOT_CAUSE_WAIT_S
        while not self._deaths and len(self._failures) < len(self._ranks):
            if (remaining_s := deadline - time.monotonic()) <= 0:
                return
            self._on_frame(self._sender.receive(remaining_s))

    def _on_node(self, rank: int) -> str:
        """Return the rank's node and stage for an error, if the ranks have several."""
        nodes, stage = [each.status.node for each in self._ranks], self._split.describe(rank)
        on_node = f" on {nodes[rank]}" if len(set(nodes)) > 1 else ""
        return f"{on_node} ({stage})" if stage else on_node

    @property
    def _step_in_flight(self) -> int | None:
        return self._gathered_step + 1 if self._broadcast_step > self._gathered_step else None

    @property
    def _stage_of_step(self) -> str | None:
        """Return the stage that the ranks that live report of the failed step, if one does."""
        return next((failure.stage for failure in self._failures), None)


class _StatusCalls:
    """Questions to ranks for the stage that they are in, which never wait.

    Args:
        ranks: number |-> its actor.
    """

    def __init__(self, ranks: Mapping[int, ray.actor.ActorHandle]) -> None:
        self._calls = {rank: worker.status.remote() for rank, worker in ranks.items()}

    def take_answers(self) -> dict[int, str]:
        if not self._calls:
            return {}
        stages: dict[int, str] = {}
        ready, _ = ray.wait(list(self._calls.values()), num_returns=len(self._calls), timeout=0)
        for rank, call in list(self._calls.items()):
            if call in ready:
                del self._calls[rank]
                with suppress(RayError):  # the process died during the call
                    stages[rank] = ray.get(call).stage
        return stages


class SparesClock:
    """Decides when, in one life of the ranks, spare processes are started.

    A spare process takes seconds of a core to start, which the requests of a small machine would lack: on two cores
    860 tokens per second became 600. Times are in seconds, of a clock that never goes back.
    """

    def __init__(self) -> None:
        self._first_step_s: float | None = None
        self._last_step_s = 0.0
        self._is_done = False

    def note_step(self, now_s: float) -> bool:
        """Note that a step has ended; return True if spares are to be started now."""
        if self._first_step_s is None:
            self._first_step_s = now_s
        self._last_step_s = now_s
        return self._is_due(now_s - self._first_step_s >= BUSY_S)

    def note_idle(self, now_s: float) -> bool:
        """Note that no step is computed; return True if spares are to be started now."""
        has_stepped = self._first_step_s is not None
        return self._is_due(has_stepped and now_s - self._last_step_s >= IDLE_S)

    def _is_due(self, is_time: bool) -> bool:
        is_due = is_time and not self._is_done
        self._is_done = self._is_done or is_due
        return is_due
