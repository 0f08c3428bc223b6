"""The step loop rebuilds failed ranks and goes on, answers meanwhile, and gives up after bounded attempts."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fakes import FakeWorkerGroup, oracle, small_config, submit

from quire.proto.engine_command import Action, EngineCommand
from quire.proto.errors import QuireError, RankFailed, ReplicaUnavailable
from quire.proto.replica_status import Activity, ReplicaStatus
from quire.proto.step import StepResult
from quire.proto.stream import (
    ControlEngine,
    EngineControlled,
    Finish,
    ReplicaMessage,
    StatusQuery,
    Submit,
    TokenBatch,
)
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service import recovery
from quire.scheduler.service.loop import StepLoop
from quire.scheduler.service.mailbox import InMemoryMailbox
from quire.scheduler.service.worker_group import Rebuilt

DEADLINE_S = 60.0
GATEWAY = b"gateway"
KILLED = RankFailed(1, "its process was killed by SIGKILL")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Group(FakeWorkerGroup):
    """Ranks that a test can hold, and whose rebuilding it can hold.

    Attributes:
        is_hung: no result comes.
        examined: (waited_s, is_overdue) of each examination.
    """

    is_hung = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.may_rebuild = threading.Event()
        self.may_rebuild.set()
        self.examined: list[tuple[float, bool]] = []

    def gather(self, timeout_s: float) -> StepResult | None:  # type: ignore[override]
        return None if self.is_hung else super().gather(timeout_s)

    def examine(self, waited_s: float, *, failed_s: float) -> None:
        is_overdue = waited_s >= failed_s
        self.examined.append((waited_s, is_overdue))
        if is_overdue:
            self.is_hung = False
            raise RankFailed(1, f"no answer in {waited_s:.1f} s", 3)

    def rebuild(self, epoch: int) -> Rebuilt:
        assert self.may_rebuild.wait(DEADLINE_S)
        return super().rebuild(epoch)


class Serving:
    """A step loop on a thread of its own, and a gateway in this one."""

    def __init__(self, clock: Any = None, **limits: Any) -> None:
        config = small_config(**limits)
        self.group = Group(config)
        self.mailbox = InMemoryMailbox()
        self.messages: list[ReplicaMessage] = []
        self.arrived = threading.Condition()
        self.mailbox.connect(GATEWAY, self._on_message)
        arguments = {} if clock is None else {"clock": clock}
        self.loop = StepLoop(Scheduler(config), self.group, self.mailbox, "replica-0", **arguments)
        self.error: QuireError | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._query_ids = itertools.count(1000)

    def _run(self) -> None:
        try:
            self.loop.run()
        except QuireError as error:
            self.error = error

    def _on_message(self, message: ReplicaMessage) -> None:
        with self.arrived:
            self.messages.append(message)
            self.arrived.notify_all()

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.mailbox.post(GATEWAY, message)

    def wait_for(self, condition: Any) -> Any:
        """Return the first true value of condition(message) over all messages."""

        def found() -> Any:
            return next((value for value in map(condition, list(self.messages)) if value), None)

        with self.arrived:
            assert self.arrived.wait_for(found, DEADLINE_S), "the message did not come"
            return found()

    def end_of(self, handle: int) -> Finish:
        def find(message: ReplicaMessage) -> Finish | None:
            ends = message.finished if isinstance(message, TokenBatch) else ()
            return next((each for each in ends if each.handle == handle), None)

        end = self.wait_for(find)
        assert isinstance(end, Finish)
        return end

    def output(self, handle: int) -> list[int]:
        batches = [message for message in self.messages if isinstance(message, TokenBatch)]
        return [token for batch in batches for token in batch.token_ids[batch.handles == handle].tolist()]

    def command(self, query_id: int, action: Action) -> None:
        """Send a command, and wait until it is carried out."""
        self.send(ControlEngine(query_id, EngineCommand(action)))
        self.wait_for(lambda message: message == EngineControlled(query_id))

    def fail_in_a_step(self, failure: RankFailed, request: Submit) -> None:
        """Let the ranks fail in a step of a request, and not before it has come, while they are idle."""
        self.group.is_hung = True
        self.send(request)
        while not self.status(next(self._query_ids)).num_running:
            pass
        self.group.failure = failure
        self.group.is_hung = False

    def status(self, query_id: int) -> ReplicaStatus:
        self.send(StatusQuery(query_id))
        found = self.wait_for(
            lambda message: (
                message if isinstance(message, ReplicaStatus) and message.query_id == query_id else None
            )
        )
        assert isinstance(found, ReplicaStatus)
        return found


@contextmanager
def serving(*arguments: Any, **limits: Any) -> Iterator[Serving]:
    served = Serving(*arguments, **limits)
    served.thread.start()
    try:
        yield served
    finally:
        served.group.may_rebuild.set()
        served.loop.stop()
        served.thread.join(DEADLINE_S)
        assert not served.thread.is_alive(), "the step loop did not end"


def is_recovering(message: ReplicaMessage) -> bool:
    return isinstance(message, ReplicaStatus) and message.activity is Activity.RECOVERING


def test_requests_continue_after_a_recovery() -> None:
    with serving() as served:
        served.group.may_rebuild.clear()
        served.fail_in_a_step(KILLED, submit(1, [5, 6], max_tokens=20, ignore_eos=True))
        served.wait_for(is_recovering)
        served.group.failure = None
        served.group.may_rebuild.set()
        end = served.end_of(1)
        assert served.output(1) == oracle([5, 6], 20, stops=())
        assert end.timings.num_recoveries == 1
        assert served.status(1).num_recoveries == 1
        assert served.group.rebuilt == [2]


def test_ranks_that_fail_in_sleep_are_rebuilt_when_a_command_comes() -> None:
    with serving() as served:
        served.command(1, Action.SLEEP)
        served.group.failure = KILLED
        query_ids = itertools.count(2)
        while served.status(next(query_ids)).activity is not Activity.RECOVERING:
            pass
        problem = served.status(next(query_ids)).problem
        assert problem.startswith(
            "the ranks are rebuilt when the next command comes: rank 1 failed: its process"
        )
        assert served.group.rebuilt == []
        served.group.failure = None
        served.command(next(query_ids), Action.WAKE_UP)
        served.send(submit(1, [5, 6], max_tokens=20, ignore_eos=True))
        served.end_of(1)
        assert served.output(1) == oracle([5, 6], 20, stops=())
        assert served.group.rebuilt == [2]
        assert [each.action for each in served.group.commands] == [Action.SLEEP, Action.SLEEP, Action.WAKE_UP]


def test_status_and_new_requests_are_answered_during_a_recovery() -> None:
    with serving() as served:
        served.group.may_rebuild.clear()
        served.fail_in_a_step(KILLED, submit(1, [5, 6], max_tokens=4, ignore_eos=True))
        served.wait_for(is_recovering)
        status = served.status(7)
        assert status.activity is Activity.RECOVERING
        assert (
            "the ranks are being rebuilt: rank 1 failed: its process was killed by SIGKILL" in status.problem
        )
        served.send(submit(2, [7], max_tokens=3, ignore_eos=True))
        assert served.status(8).num_waiting == 2
        served.group.failure = None
        served.group.may_rebuild.set()
        served.end_of(2)
        assert served.output(2) == oracle([7], 3, stops=())
        assert served.status(9).problem == ""


def test_recovery_is_given_up_after_bounded_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "FIRST_DELAY_S", 0.001)
    with serving() as served:
        served.group.rebuild_error = ReplicaUnavailable("no memory for rank 1")
        served.fail_in_a_step(
            RankFailed(1, "its process was killed by SIGKILL", 3), submit(1, [5, 6], max_tokens=4)
        )
        error = served.end_of(1).error
    assert "rank 1 failed at step 3: its process was killed by SIGKILL; given up: 4 attempts" in error
    assert "no memory for rank 1" in error
    assert str(served.error) == error
    assert served.group.rebuilt == [2] * recovery.MAX_ATTEMPTS


def test_stop_ends_a_recovery() -> None:
    with serving() as served:
        served.group.may_rebuild.clear()
        served.fail_in_a_step(KILLED, submit(1, [5, 6], max_tokens=4))
        served.wait_for(is_recovering)
        served.loop.stop()
        assert "is shutting down" in served.end_of(1).error


def test_late_ranks_are_examined_and_overdue_ones_are_replaced() -> None:
    clock = Clock()
    with serving(clock, step_timeout_s=10.0) as served:
        served.send(submit(1, [5, 6], max_tokens=3, ignore_eos=True))
        served.end_of(1)  # its steps took no time
        served.group.is_hung = True
        served.send(submit(2, [5, 7], max_tokens=3, ignore_eos=True))
        while served.status(int(clock.now * 10)).activity is not Activity.LATE:
            clock.now += 0.2
        assert not served.group.rebuilt
        clock.now += 5.0
        end = served.end_of(2)
    assert served.output(2) == oracle([5, 7], 3, stops=())
    assert end.timings.num_recoveries == 1
    assert [is_overdue for _, is_overdue in served.group.examined][-1]
    assert served.group.examined[0][1] is False


def test_activity_tells_a_long_prefill_from_a_late_step() -> None:
    clock = Clock()
    with serving(clock) as served:
        assert served.status(1).activity is Activity.IDLE
        served.loop._scheduler._state.step_times.observe(2, clock.now - 3.0, clock.now)
        served.group.is_hung = True
        served.send(submit(1, [5, 6], max_tokens=3, ignore_eos=True))
        query_id = 2
        while served.status(query_id).activity is not Activity.PREFILL:
            query_id += 1
        clock.now += 2.0
        status = served.status(query_id + 1)
        assert status.activity is Activity.PREFILL
        assert status.activity_s == pytest.approx(2.0)
        served.group.is_hung = False
        served.end_of(1)
