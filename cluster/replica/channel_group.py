"""ChannelWorkerGroup: ranks behind a StepChannel. Ray carries no step and only reports processes that died."""

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

# Seconds to wait for the root cause of a failure. One rank's death fails the collectives of the others, whose reports
# come first: Ray reports a killed process 12 to 29 ms later.
_ROOT_CAUSE_WAIT_S = 0.3
# For a rank's process to report its stage.
_STAGE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class ChannelGroupFactory:
    """Makes the group in the process that calls it. It is picklable; the group's sockets are not.

    Attributes:
        address: where to bind the step channel.
        workers: handles of the WorkerActors, by rank.
        statuses: the ranks' statuses after loading, by rank.
        join_timeout_s: for every rank to join the channel.
    """

    address: ChannelAddress
    workers: tuple[ActorHandle, ...]
    statuses: tuple[RankStatus, ...]
    join_timeout_s: float

    def __call__(self) -> ChannelWorkerGroup:
        return ChannelWorkerGroup(self)


class ChannelWorkerGroup:
    """A WorkerGroup; see scheduler.service.worker_group for its methods."""

    def __init__(self, factory: ChannelGroupFactory) -> None:
        self._workers = factory.workers
        self._statuses = factory.statuses
        self._sender = StepSender(factory.address, len(factory.workers))
        self._epoch = 0
        self._broadcast_step = 0
        self._replied_steps = [0] * len(
            factory.workers
        )  # rank |-> step of its latest reply; replies are in order
        self._results: deque[StepResult] = deque()  # of rank 0, not gathered yet
        self._gathered_step = 0
        self._failures: list[StepFailure] = []  # reported by the ranks, in order of arrival
        self._deaths: dict[int, str] = {}  # rank |-> how its process ended; written by Ray's thread
        self._closed = False
        # The future of run() is done when the rank's process ends, for any reason.
        self._ends: list[Future[None]] = []
        try:
            self._start(factory)
        except BaseException:
            self.close()
            raise

    def _start(self, factory: ChannelGroupFactory) -> None:
        for rank, worker in enumerate(self._workers):
            end: Future[None] = worker.run.remote(self._sender.address).future()
            end.add_done_callback(partial(self._on_rank_end, rank))
            self._ends.append(end)
        self._sender.wait_for_ranks(factory.join_timeout_s)
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
                raise self._timeout_error(timeout_s)
            self._on_frame(self._sender.receive(remaining_s))
            self._raise_failure()
        result = self._results.popleft()
        self._gathered_step = result.step_id
        return result

    def check(self) -> None:
        while (frame := self._sender.receive(0)) is not None:
            self._on_frame(frame)
        self._raise_failure()

    def statuses(self) -> tuple[RankStatus, ...]:
        return tuple(
            replace(status, stage="idle" if step_id >= self._broadcast_step else "step")
            for status, step_id in zip(self._statuses, self._replied_steps, strict=True)
        )

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
            if reply.rank == 0:
                self._results.append(reply)

    def _on_rank_end(self, rank: int, end: Future[None]) -> None:
        """Record a process that died, on a thread of Ray's. A rank whose run() returned has sent its own reason."""
        error = end.exception()
        if error is None or self._closed:
            return
        self._deaths[rank] = describe(error)
        self._sender.interrupt()

    def _raise_failure(self) -> None:
        """Raise RankFailed for the rank that failed first, if any rank has failed."""
        if not self._failures and not self._deaths:
            return
        deadline = time.monotonic() + _ROOT_CAUSE_WAIT_S
        while not self._deaths and len(self._failures) < len(self._workers):
            if (remaining_s := deadline - time.monotonic()) <= 0:
                break
            self._on_frame(self._sender.receive(remaining_s))
        if self._deaths:
            rank, reason = next(iter(self._deaths.items()))
            raise RankFailed(rank, reason + self._on_node(rank), self._step_in_flight)
        failed = {failure.rank for failure in self._failures}
        self._raise_if_hung([rank for rank in range(len(self._workers)) if rank not in failed])
        first = self._failures[0]
        raise RankFailed(first.rank, first.reason, first.step_id or None, first.stage)

    def _raise_if_hung(self, ranks: list[int]) -> None:
        for rank, stage in self._stages(ranks).items():
            if stage is None:
                reason = f"its process{self._on_node(rank)} does not answer"
                raise RankFailed(rank, reason, self._step_in_flight)

    def _timeout_error(self, timeout_s: float) -> RankFailed:
        """Return the error for a step without a result in time."""
        step_id = self._gathered_step + 1
        late = [rank for rank, replied in enumerate(self._replied_steps) if replied < step_id]
        stages = self._stages(late)
        # A rank whose process is stopped blocks the others in a collective, so it is named first.
        rank = next((rank for rank in late if stages[rank] is None), late[0])
        others = ", ".join(f"rank {other} in stage {stages[other]}" for other in late if other != rank)
        silence = f"; its process{self._on_node(rank)} does not answer either" if stages[rank] is None else ""
        waiting = f" (also without an answer: {others})" if others else ""
        return RankFailed(rank, f"no answer in {timeout_s:g} s{silence}{waiting}", step_id, stages[rank])

    def _stages(self, ranks: list[int]) -> dict[int, str | None]:
        """Return rank |-> the stage that it reports; None for a process that does not answer in time."""
        calls = {rank: self._workers[rank].status.remote() for rank in ranks}
        if not calls:
            return {}
        ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_STAGE_TIMEOUT_S)
        stages: dict[int, str | None] = dict.fromkeys(ranks)
        for rank, call in calls.items():
            if call in ready:
                try:
                    stages[rank] = ray.get(call).stage
                except RayError:
                    continue  # the process died during the call
        return stages

    def _on_node(self, rank: int) -> str:
        """Return the rank's node for an error, if the ranks are on several nodes."""
        nodes = [status.node for status in self._statuses]
        return f" on {nodes[rank]}" if len(set(nodes)) > 1 else ""

    @property
    def _step_in_flight(self) -> int | None:
        return self._gathered_step + 1 if self._broadcast_step > self._gathered_step else None
