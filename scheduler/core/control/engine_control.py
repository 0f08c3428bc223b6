"""EngineControl: pauses, sleep, and updates of weights of one replica, between its steps."""

from __future__ import annotations

from collections import deque
from hashlib import sha256

from ....proto.engine_command import ALL_TAGS, Action, EngineCommand, PauseMode, SleepTag
from ....proto.errors import QuireError, ReplicaUnavailable, RequestAborted
from ....proto.step import StepPlan, StepResult
from ..state import SchedulerState
from ..steps.in_flight import NO_ROWS, InFlightStep

# Of a gateway, and its query.
Caller = tuple[bytes, int]

MAX_ORDERS = 16


class EngineControl:
    """Commands to the ranks and their effect on sequences.

    A command waits until no step is in flight. Those that replace or drop weights or KV take the rows of all running
    sequences, which continue afterwards from their tokens.

    Attributes:
        weights_version: of the weights in use; empty for those that the replica started with.
        is_paused, is_asleep: no step is planned meanwhile.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._orders: deque[tuple[EngineCommand, Caller | None]] = deque()
        self._replies: list[tuple[Caller, str]] = []
        self._problems: list[str] = []  # of commands without a caller
        self._under_way: tuple[EngineCommand, Caller | None] | None = None
        self._update: EngineCommand | None = None  # the latest that was carried out
        self._level = 0  # of the present sleep
        self._awake = ALL_TAGS
        self._has_weights = True
        self.is_paused = False

    @property
    def is_asleep(self) -> bool:
        return self._level > 0

    @property
    def weights_version(self) -> str:
        return "" if self._update is None else self._update.version

    @property
    def update(self) -> EngineCommand | None:
        """Return the latest update of weights that was carried out; None before the first."""
        return self._update

    @property
    def sleep_level(self) -> int:
        """Return the level of the present sleep; 0 while the replica is awake."""
        return self._level

    @property
    def holds_steps(self) -> bool:
        """Return whether no step may be planned."""
        if self.is_paused or self.is_asleep or self._under_way is not None:
            return True
        return bool(self._orders) and not self._waits_for_running

    @property
    def holds_admission(self) -> bool:
        """Return whether no waiting sequence may start."""
        return bool(self._orders)

    @property
    def stays_asleep(self) -> bool:
        """Return whether the replica sleeps, and no command waits or is being carried out."""
        return self.is_asleep and not self._orders and self._under_way is None

    @property
    def _waits_for_running(self) -> bool:
        """Return whether the next command waits for running sequences."""
        command, _ = self._orders[0]
        may_run = not (self.is_paused or self.is_asleep)
        return command.mode is PauseMode.WAIT and may_run and bool(self._state.running)

    def order(self, command: EngineCommand, caller: Caller | None) -> None:
        """Queue a command; `take_replies` has the outcome later.

        An update that this replica has carried out, or that another gateway has ordered already, is not repeated.
        """
        if command.timestamp and command.timestamp == (self._update.timestamp if self._update else ""):
            self._reply(caller, "")
            return
        if caller is None and self._is_ordered(command):
            return
        error = self._refusal(command)
        if error:
            self._reply(caller, error)
            return
        if command.mode is PauseMode.ABORT and command.action not in (Action.RESUME, Action.WAKE_UP):
            self._abort_all()
        self._orders.append((command, caller))

    def refusal(self) -> QuireError | None:
        """Return the error of a new request while the engine sleeps."""
        return ReplicaUnavailable("the engine sleeps; wake it up first") if self.is_asleep else None

    def take_replies(self) -> list[tuple[Caller, str]]:
        """Return the outcomes since the last call, as (caller, error); the error is empty after a success."""
        replies, self._replies = self._replies, []
        return replies

    def take_problems(self) -> list[str]:
        """Return why commands without a caller failed since the last call, for the log."""
        problems, self._problems = self._problems, []
        return problems

    def plan(self, epoch: int, now: float) -> StepPlan | None:
        """Return the step of the next command, if it is due. Applies those that do not concern the ranks."""
        state = self._state
        while self._orders and not state.in_flight and not self._waits_for_running:
            command, caller = self._orders.popleft()
            if command.action in (Action.PAUSE, Action.RESUME):
                self.is_paused = command.action is Action.PAUSE
                self._reply(caller, "")
                continue
            if self._lacks_weights(command):
                self._reply(
                    caller,
                    "the weights were discarded by sleep at level 2; update_weights must name others first",
                )
                continue
            state.requeue_all(now)
            self._under_way = command, caller
            step_id = state.in_flight.next_id
            state.in_flight.add(InFlightStep(step_id, NO_ROWS, [], 0, now, is_command=True))
            return StepPlan(step_id, epoch, state.blocks.tables.digest, command=command)
        return None

    def on_result(self, result: StepResult) -> None:
        """Apply the outcome of the command's step, which is the oldest in flight."""
        self._state.in_flight.pop()
        assert self._under_way is not None, "a command ended that was not begun"
        (command, caller), self._under_way = self._under_way, None
        if not result.command_error:
            self._apply(command)
            if self._state.lora is not None:
                self._state.lora.reset()  # the ranks have dropped the adapters with the layers that they change
        self._reply(caller, result.command_error)

    def on_recovery(self, *, has_new_ranks: bool) -> None:
        """Repeat the command that failed, and bring new ranks into the present state.

        All ranks are awake, and a new one has loaded the weights that the replica started with.
        """
        if self._under_way is not None:
            self._orders.appendleft(self._under_way)
            self._under_way = None
        if self.is_asleep:
            if self._awake:
                self._orders.appendleft(
                    (EngineCommand(Action.WAKE_UP, tags=tuple(sorted(self._awake))), None)
                )
            self._orders.appendleft((EngineCommand(Action.SLEEP, level=1 if self._has_weights else 2), None))
        if has_new_ranks and self._update is not None:
            self._orders.appendleft((self._update, None))

    def _refusal(self, command: EngineCommand) -> str:
        """Return why a command cannot be carried out; empty if it can."""
        if len(self._orders) >= MAX_ORDERS:
            return f"{len(self._orders)} commands wait already"
        if command.timestamp and self._update is not None and command.timestamp < self._update.timestamp:
            return f"weights {self._update.version!r} were ordered later, and are in use"
        return ""

    def _lacks_weights(self, command: EngineCommand) -> bool:
        """Return whether a command would wake all, and there are no weights to wake with."""
        return (
            command.action is Action.WAKE_UP
            and not self._has_weights
            and self._awake_after(command) == ALL_TAGS
        )

    def _awake_after(self, command: EngineCommand) -> frozenset[SleepTag]:
        """Return what is awake after WAKE_UP."""
        return self._awake.union(command.tags or ALL_TAGS)

    def _is_ordered(self, command: EngineCommand) -> bool:
        """Return whether the same update waits or is carried out."""
        under_way = () if self._under_way is None else (self._under_way,)
        return any(command.timestamp == other.timestamp for other, _ in (*under_way, *self._orders))

    def _apply(self, command: EngineCommand) -> None:
        if command.action is Action.SLEEP:
            self._level, self._awake = max(self._level, command.level), frozenset()
            self._has_weights = self._has_weights and command.level < 2
        elif command.action is Action.WAKE_UP:
            self._awake = self._awake_after(command)
            if self._awake == ALL_TAGS:
                self._level = 0
        else:
            self._update, self._has_weights = command, True
            for sequence in self._state.alive.values():
                sequence.change_root(self.root_of(sequence.root), command.version)

    def root_of(self, root: bytes) -> bytes:
        """Return the start of digest chains of the weights in use, from that of the first weights."""
        return root if self._update is None else sha256(root + self._update.version.encode()).digest()

    def _abort_all(self) -> None:
        state, error = self._state, RequestAborted("an operator's command aborted all requests")
        while state.requests:
            key, _ = next(iter(state.requests.items()))
            state.fail_request(key, error)

    def _reply(self, caller: Caller | None, error: str) -> None:
        if caller is not None:
            self._replies.append((caller, error))
        elif error:
            self._problems.append(error)
