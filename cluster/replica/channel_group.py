"""ChannelWorkerGroup: ranks behind a StepChannel. Ray stands by as sentinel only: it says when a process has died."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from ...proto.errors import RankFailed
from ...proto.step import StepFailure, StepPlan, StepResult, decode_reply
from ...proto.stream import RankStatus
from ...proto.transport.channel import ChannelAddress, StepSender
from ..ray_runtime.errors import describe

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# How long to look for the root of a failure. One rank's death fails the collectives of the others, and their
# news comes first: Ray knows of a killed process 12 to 29 ms later.
_EVIDENCE_S = 0.3
# For a rank's process to say what it is doing.
_STAGE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class ChannelGroupMaker:
    """Builds the group in the process that calls it: small and picklable, which a group's sockets are not.

    Attributes:
        address: where to bind the step channel.
        workers: handles of the WorkerActors, by rank.
        statuses: what the ranks said of themselves once loaded, by rank.
        join_timeout_s: for every rank to hear the channel.
    """

    address: ChannelAddress
    workers: tuple[ActorHandle, ...]
    statuses: tuple[RankStatus, ...]
    join_timeout_s: float

    def __call__(self) -> ChannelWorkerGroup:
        return ChannelWorkerGroup(self)


class ChannelWorkerGroup:
    """A WorkerGroup; see scheduler.worker_group for its methods."""

    def __init__(self, maker: ChannelGroupMaker) -> None:
        self._workers = maker.workers
        self._statuses = maker.statuses
        self._sender = StepSender(maker.address, len(maker.workers))
        self._epoch = 0
        self._broadcast_step = 0
        self._answered_steps = [0] * len(maker.workers)  # rank |-> its latest answer; a rank answers in order
        self._results: deque[StepResult] = deque()  # of rank 0, not gathered yet
        self._gathered_step = 0
        self._failures: list[StepFailure] = []  # the ranks' own words, as they came
        self._deaths: dict[int, str] = {}  # rank |-> how its process ended; written by Ray's thread
        self._closed = False
        # A reference to run() ends when the rank's process does, however it does.
        self._lives: list[Future[None]] = []
        try:
            self._start(maker)
        except BaseException:
            self.close()
            raise

    def _start(self, maker: ChannelGroupMaker) -> None:
        for rank, worker in enumerate(self._workers):
            life: Future[None] = worker.run.remote(self._sender.address).future()
            life.add_done_callback(partial(self._note_end, rank))
            self._lives.append(life)
        self._sender.wait_for_ranks(maker.join_timeout_s)
        self.check()

    def broadcast(self, plan: StepPlan) -> None:
        self._epoch = plan.epoch
        self._broadcast_step = plan.step_id
        self._sender.send(plan.encode())

    def gather(self, timeout_s: float) -> StepResult:
        deadline = time.monotonic() + timeout_s
        while not self._results:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise self._overdue(timeout_s)
            self._take(self._sender.receive(remaining_s))
            self._raise_failure()
        result = self._results.popleft()
        self._gathered_step = result.step_id
        return result

    def check(self) -> None:
        while (frame := self._sender.receive(0)) is not None:
            self._take(frame)
        self._raise_failure()

    def statuses(self) -> tuple[RankStatus, ...]:
        answered = zip(self._statuses, self._answered_steps, strict=True)
        return tuple(
            replace(status, stage="idle" if step_id >= self._broadcast_step else "step")
            for status, step_id in answered
        )

    def close(self) -> None:
        self._closed = True
        self._sender.close()

    def _take(self, frame: bytes | None) -> None:
        if frame is None:
            return
        reply = decode_reply(frame)
        if isinstance(reply, StepFailure):
            self._failures.append(reply)
        elif reply.epoch == self._epoch:
            self._answered_steps[reply.rank] = reply.step_id
            if reply.rank == 0:
                self._results.append(reply)

    def _note_end(self, rank: int, life: Future[None]) -> None:
        """Runs on a thread of Ray's when a rank's run() ends. One that returned has told its reason itself."""
        error = life.exception()
        if error is None or self._closed:
            return
        self._deaths[rank] = describe(error)
        self._sender.interrupt()

    def _raise_failure(self) -> None:
        """Raises RankFailed for the rank at the root of what is known to have failed, if anything has."""
        if not self._failures and not self._deaths:
            return
        deadline = time.monotonic() + _EVIDENCE_S
        while not self._deaths and len(self._failures) < len(self._workers):
            if (remaining_s := deadline - time.monotonic()) <= 0:
                break
            self._take(self._sender.receive(remaining_s))
        if self._deaths:
            rank, reason = next(iter(self._deaths.items()))
            raise RankFailed(rank, reason + self._on_node(rank), self._step_under_way)
        failed = {failure.rank for failure in self._failures}
        self._raise_if_hung([rank for rank in range(len(self._workers)) if rank not in failed])
        first = self._failures[0]
        raise RankFailed(first.rank, first.reason, first.step_id or None, first.stage)

    def _raise_if_hung(self, ranks: list[int]) -> None:
        for rank, stage in self._stages(ranks).items():
            if stage is None:
                reason = f"its process{self._on_node(rank)} does not answer"
                raise RankFailed(rank, reason, self._step_under_way)

    def _overdue(self, timeout_s: float) -> RankFailed:
        """What to raise when a step has no result in time."""
        step_id = self._gathered_step + 1
        late = [rank for rank, answered in enumerate(self._answered_steps) if answered < step_id]
        stages = self._stages(late)
        # A rank whose process is stopped holds the others in a collective.
        rank = next((rank for rank in late if stages[rank] is None), late[0])
        others = ", ".join(f"rank {other} in stage {stages[other]}" for other in late if other != rank)
        silence = f"; its process{self._on_node(rank)} does not answer either" if stages[rank] is None else ""
        waiting = f" (also without an answer: {others})" if others else ""
        return RankFailed(rank, f"no answer in {timeout_s:g} s{silence}{waiting}", step_id, stages[rank])

    def _stages(self, ranks: list[int]) -> dict[int, str | None]:
        """rank |-> the stage it says it is in; None for a process that does not answer at once."""
        answers = {rank: self._workers[rank].status.remote() for rank in ranks}
        if not answers:
            return {}
        ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=_STAGE_TIMEOUT_S)
        stages: dict[int, str | None] = dict.fromkeys(ranks)
        for rank, answer in answers.items():
            if answer in ready:
                try:
                    stages[rank] = ray.get(answer).stage
                except RayError:
                    continue  # it died while it was asked
        return stages

    def _on_node(self, rank: int) -> str:
        """Where a rank is, when they are not all in one place."""
        nodes = [status.node for status in self._statuses]
        return f" on {nodes[rank]}" if len(set(nodes)) > 1 else ""

    @property
    def _step_under_way(self) -> int | None:
        return self._gathered_step + 1 if self._broadcast_step > self._gathered_step else None
