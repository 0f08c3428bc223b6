"""SimulatedReplica: the scheduler and step loop of a replica, over ranks that only take time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ...proto.replica_status import RankStatus, ReplicaStatus
from ...proto.step import EncoderInput, StepPlan, StepResult
from ...proto.stream import CacheReport, GatewayMessage, ReplicaMessage, TokenBatch
from ...scheduler import Rebuilt, Scheduler, StepLoop, WorkerGroup
from ..fleet.controller.fleet_state import ReplicaState
from .kv_network import KvNetwork, KvPeer
from .step_time import StepWork, TimesSteps
from .traces import FIRST_TOKEN, VOCAB_SIZE

GATEWAY = b"simulated"
# Random tokens of outputs, used over and over: later prompts contain none of them.
_NUM_RANDOM = 1 << 16
# Equal steps that are worth running at once, and so many that their tokens take little memory.
_LEAST_EQUAL_STEPS, _MOST_EQUAL_STEPS = 3, 256


class SimulatedClock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PlanMeter:
    """Follows the rows of a worker group from its plans, and counts what each step computes.

    Plans with drafted tokens are not supported.
    """

    def __init__(self, num_rows: int) -> None:
        self._decoding = np.zeros(num_rows, np.bool_)
        self._num_known = np.zeros(num_rows, np.int64)  # at the start of the row's sequence
        self._num_computed = np.zeros(num_rows, np.int64)

    def measure(self, plan: StepPlan) -> tuple[StepWork, npt.NDArray[np.intp]]:
        """Return the work of the next plan, and the rows that sample a token, in order."""
        decoding, num_computed = self._decoding, self._num_computed
        if plan.released_rows.size:
            decoding[plan.released_rows] = False
        for new in plan.new:
            self._num_known[new.row] = new.token_ids.size
            num_computed[new.row] = new.num_computed_tokens
        active = np.flatnonzero(decoding)
        if plan.held_rows.size:
            active = active[~np.isin(active, plan.held_rows)]
        num_computed[active] += 1
        num_decoded, num_read = active.size, int(num_computed[active].sum())
        if not plan.chunk_rows.size:
            work = StepWork(num_decoded, num_decoded, num_read, 0, len(plan.new), plan.released_rows.size)
            return work, active
        rows, lens = plan.chunk_rows, plan.chunk_lens.astype(np.int64)
        before = num_computed[rows]
        after = before + lens
        num_computed[rows] = after
        complete = rows[after == self._num_known[rows]]
        decoding[complete] = True
        num_pairs = int((lens * before + lens * (lens + 1) // 2).sum())
        num_tokens, num_read = num_decoded + int(lens.sum()), num_read + int(after.sum())
        work = StepWork(
            num_tokens,
            num_decoded + rows.size,
            num_read,
            num_pairs,
            len(plan.new),
            plan.released_rows.size,
        )
        return work, np.sort(np.concatenate([active, complete]))

    def decoding(self) -> tuple[int, int]:
        """Return the number of rows that decode, and the tokens whose KV they have read together."""
        active = np.flatnonzero(self._decoding)
        return active.size, int(self._num_computed[active].sum())

    def repeat(self, count: int) -> None:
        """Count so many steps in which all rows that decode compute a token."""
        self._num_computed[self._decoding] += count


class EqualResults(NamedTuple):
    """Results of steps in which the same rows decode; see `Scheduler.run_equal_steps`."""

    token_ids: npt.NDArray[np.int32]  # [steps, rows]
    planned_at: list[float]
    done_at: list[float]


class SimulatedRanks:
    """WorkerGroup without a model: steps take the time of a StepTime and return random tokens.

    Args:
        on_elapsed: called with the seconds before each result, during which the state is that of the plans so far.
        kv: reads and lends blocks; None if no KV travels.
    """

    def __init__(
        self,
        num_rows: int,
        clock: SimulatedClock,
        step_time: TimesSteps,
        on_elapsed: Callable[[float], None] | None = None,
        kv: KvPeer | None = None,
    ) -> None:
        self._kv = kv
        self._clock, self._step_time, self._on_elapsed = clock, step_time, on_elapsed
        self._meter = PlanMeter(num_rows)
        self._random = (
            np.random.default_rng(0).integers(FIRST_TOKEN, VOCAB_SIZE, _NUM_RANDOM).astype(np.int32)
        )
        self._num_used = self._step_id = self._epoch = 0
        self._busy_until = 0.0
        self._results: deque[tuple[float, StepResult]] = deque()

    def broadcast(self, plan: StepPlan) -> None:
        work, rows = self._meter.measure(plan)
        self._step_id, self._epoch = plan.step_id, plan.epoch
        now = self._clock.now
        if self._kv is not None and plan.kv is not None:
            self._kv.apply(plan.kv, max(self._busy_until, now))
        if self._kv is not None and not work.num_tokens:
            begin = max(self._busy_until, now)
            self._busy_until = self._kv.next_report_at(begin)
            seconds = self._busy_until - begin
        else:
            seconds = self._take(work, now)
        self._add_result(self._sample(rows.size), seconds)

    def _take(self, work: StepWork, now: float) -> float:
        """Be busy with a step that is planned now; return its seconds."""
        seconds = self._step_time.seconds(work)
        self._busy_until = max(self._busy_until, now) + seconds
        return seconds

    def _sample(self, num_tokens: int) -> npt.NDArray[np.int32]:
        if self._num_used + num_tokens > _NUM_RANDOM:
            self._num_used = 0
        self._num_used += num_tokens
        return self._random[self._num_used - num_tokens : self._num_used]

    def _add_result(self, token_ids: npt.NDArray[np.int32], seconds: float) -> None:
        result = StepResult(self._step_id, self._epoch, 0, token_ids, None, {"forward": seconds})
        self._results.append((self._busy_until, result))

    def repeat(self, most: int, until: float) -> EqualResults:
        """Compute `most` steps in which all rows decode, or fewer if one would be planned at `until` or later.

        The first is planned now, and each other one at the next result, which is taken.
        """
        num_rows, num_read = self._meter.decoding()
        planned_at: list[float] = []
        done_at: list[float] = []
        tokens: list[npt.NDArray[np.int32]] = []
        now = self._clock.now
        while len(planned_at) < most and (not planned_at or now < until):
            planned_at.append(now)
            num_read += num_rows
            seconds = self._take(StepWork(num_rows, num_rows, num_read), now)
            self._step_id += 1
            self._add_result(self._sample(num_rows), seconds)
            began_at = now
            now, result = self._results.popleft()
            tokens.append(result.token_ids)
            done_at.append(now)
            if self._on_elapsed is not None:
                self._on_elapsed(now - began_at)
        self._meter.repeat(len(planned_at))
        self._clock.now = now
        return EqualResults(np.stack(tokens), planned_at, done_at)

    def send_media(self, image: EncoderInput) -> None:
        """Take no notice of an image."""

    def gather(self, timeout_s: float) -> StepResult:
        """Return the oldest result, and move the clock to its time."""
        done_at, result = self._results.popleft()
        if self._on_elapsed is not None:
            self._on_elapsed(done_at - self._clock.now)
        self._clock.now = done_at
        return result if self._kv is None else replace(result, kv_reports=self._kv.take_reports(done_at))

    def check(self) -> None:
        """Never raises."""

    def examine(self, waited_s: float, *, failed_s: float) -> None:
        """Never raises."""

    def rebuild(self, epoch: int) -> Rebuilt:
        raise AssertionError("ranks that cannot fail are rebuilt")

    def statuses(self) -> tuple[RankStatus, ...]:
        return ()

    def close(self) -> None:
        """Nothing to free."""


class MeteredRanks:
    """WorkerGroup of real ranks that reports each step's work and seconds.

    Args:
        on_step: called with the work of a step and its seconds: from its plan, or from its predecessor's result if
            that came later.
        is_serial: seconds count from the predecessor's result in any case, so that they have the scheduler's time,
            which no step in flight hides.
    """

    def __init__(
        self,
        ranks: WorkerGroup,
        num_rows: int,
        clock: Callable[[], float],
        on_step: Callable[[StepWork, float], None],
        *,
        is_serial: bool = False,
    ) -> None:
        self._ranks, self._clock, self._on_step, self._is_serial = ranks, clock, on_step, is_serial
        self._meter = PlanMeter(num_rows)
        self._began: deque[tuple[float, StepWork]] = deque()
        self._done_at: float | None = None

    def rest(self) -> None:
        """Take the time until the next plan for idle."""
        self._done_at = None

    def broadcast(self, plan: StepPlan) -> None:
        work, _ = self._meter.measure(plan)
        self._began.append((self._clock(), work))
        self._ranks.broadcast(plan)

    def send_media(self, image: EncoderInput) -> None:
        self._ranks.send_media(image)

    def gather(self, timeout_s: float) -> StepResult | None:
        result = self._ranks.gather(timeout_s)
        if result is not None:
            began_at, work = self._began.popleft()
            now = self._clock()
            if self._done_at is not None:
                began_at = self._done_at if self._is_serial else max(began_at, self._done_at)
            self._on_step(work, now - began_at)
            self._done_at = now
        return result

    def check(self) -> None:
        self._ranks.check()

    def examine(self, waited_s: float, *, failed_s: float) -> None:
        self._ranks.examine(waited_s, failed_s=failed_s)

    def rebuild(self, epoch: int) -> Rebuilt:
        return self._ranks.rebuild(epoch)

    def statuses(self) -> tuple[RankStatus, ...]:
        return self._ranks.statuses()

    def close(self) -> None:
        self._ranks.close()


class SimulatedReplica:
    """One replica; also the Mailbox of its step loop.

    Args:
        on_tokens: called with (replica, time, batch) for each message of the step loop with tokens or ends.
        on_equal_steps: called with (handles, times) instead, if each of these steps gave each handle a token; None to
            run all steps one at a time.
        network: over which its KV travels; None if it does not.

    Attributes:
        state: stage of its life.
        is_stepping: its next turn is an event of the simulation.
    """

    def __init__(
        self,
        replica_id: str,
        config: EngineConfig,
        step_time: TimesSteps,
        on_tokens: Callable[[SimulatedReplica, float, TokenBatch], None],
        started_at: float = 0.0,
        on_elapsed: Callable[[SimulatedReplica, float], None] | None = None,
        on_equal_steps: Callable[[IntArray, list[float]], None] | None = None,
        network: KvNetwork | None = None,
    ) -> None:
        self.replica_id, self.started_at = replica_id, started_at
        self.state = ReplicaState.STARTING
        self.is_stepping = False
        self.scheduler = Scheduler(config)
        self._clock = SimulatedClock()
        self._clock.now = started_at
        elapsed = None if on_elapsed is None else lambda seconds: on_elapsed(self, seconds)
        kv = None if network is None else KvPeer(network, replica_id, config)
        self._ranks = SimulatedRanks(config.scheduler.max_num_seqs, self._clock, step_time, elapsed, kv)
        self._loop = StepLoop(self.scheduler, self._ranks, self, replica_id, self._clock)
        self._on_tokens, self._on_equal_steps = on_tokens, on_equal_steps
        self._inbox: list[tuple[bytes, GatewayMessage]] = []
        self._reported_version = 0

    @property
    def num_requests(self) -> int:
        """Return the requests that it has, those in its inbox included."""
        return self.scheduler.num_running + self.scheduler.num_waiting + len(self._inbox)

    def post(self, message: GatewayMessage) -> None:
        """Send a message, which the next turn handles."""
        self._inbox.append((GATEWAY, message))

    def turn(self, now: float, until: float) -> float | None:
        """Handle the messages so far and run a step that begins now; return its end, or None without work.

        Equal steps that begin before `until`, when the next message may come, are run at once instead.
        """
        self._clock.now = now
        self._loop.handle_messages(0.0)
        if self._on_equal_steps is not None and until > now:
            count = self.scheduler.num_equal_steps(_MOST_EQUAL_STEPS)
            if count >= _LEAST_EQUAL_STEPS:
                results = self._ranks.repeat(count, until)
                _, handles = self.scheduler.run_equal_steps(*results)
                self._on_equal_steps(handles, results.done_at)
                return self._clock.now
        if self._loop.step():
            return self._clock.now
        assert not self.scheduler.has_work, f"{self.replica_id} has sequences that it does not schedule"
        return None

    def status(self, now: float) -> ReplicaStatus:
        """Return the replica's status, as of its latest step."""
        self._clock.now = max(self._clock.now, now)
        return self._loop.status()

    def report(self) -> CacheReport:
        """Return the changes of the prefix cache since the last report."""
        changes = self.scheduler.blocks.journal.report(self._reported_version)
        self._reported_version = changes.version
        return changes

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        assert isinstance(message, TokenBatch), f"nobody asked for {message}"
        self._on_tokens(self, self._clock.now, message)
        return True

    def wake(self) -> None:
        """Nobody waits."""
