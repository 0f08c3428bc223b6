"""SimulatedReplica: the scheduler and step loop of a replica, over ranks that only take time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ...proto.replica_status import RankStatus, ReplicaStatus
from ...proto.step import EncoderInput, StepPlan, StepResult
from ...proto.stream import CacheReport, GatewayMessage, ReplicaMessage, TokenBatch
from ...scheduler import DecodedSteps, PlanMeter, Rebuilt, Scheduler, StepLoop, StepWork
from ..fleet.controller.fleet_state import ReplicaState
from .kv_network import KvNetwork, KvPeer
from .step_time import TimesSteps
from .traces import FIRST_TOKEN, VOCAB_SIZE

GATEWAY = b"simulated"
# Random tokens of outputs, used over and over: later prompts contain none of them.
_NUM_RANDOM = 1 << 16
# Equal steps that are run at once: so many that their tokens take little memory.
_MOST_EQUAL_STEPS = 256


class SimulatedClock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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

    def repeat(self, most: int, until: float, released: IntArray) -> DecodedSteps:
        """Compute `most` steps in which all rows decode, or fewer if one would be planned at `until` or later.

        The first is planned now, and each other one at the next result, which is taken.

        Args:
            released: rows that the first step releases.
        """
        self._meter.release(released)
        num_rows, num_read = self._meter.decoding()
        now, before = self._clock.now, list(self._results)
        seconds = self._step_time.decode_seconds(num_rows, num_read + num_rows, most)
        if released.size:
            first = StepWork(num_rows, num_rows, num_read + num_rows, num_ended=released.size)
            seconds[0] = self._step_time.seconds(first)
        # Each begins when the step before it ends, since none is planned later than that.
        ends = np.add.accumulate(np.concatenate([[max(self._busy_until, now)], seconds]))[1:]
        done_at = np.concatenate([[at for at, _ in before], ends])[:most]
        count = 1 + int(np.searchsorted(done_at[:-1], until))
        times = done_at[:count].tolist()
        planned_at = [now, *times[:-1]]
        if self._on_elapsed is not None:
            for begun, ended in zip(planned_at, times, strict=True):
                self._on_elapsed(ended - begun)
        sampled = self._sample_steps(count, num_rows)
        tokens = np.concatenate([*(result.token_ids[None] for _, result in before), sampled])
        durations = [*(result.stage_times["forward"] for _, result in before), *seconds.tolist()]
        self._results, first_id = deque(before[count:]), self._step_id + 1
        for place in range(max(0, count - len(before)), count):
            self._step_id, self._busy_until = first_id + place, float(ends[place])
            self._add_result(sampled[place], float(seconds[place]))
        self._step_id, self._busy_until = first_id + count - 1, float(ends[count - 1])
        self._meter.repeat(count)
        self._clock.now = times[-1]
        in_flight = before[0][1] if before else None
        return DecodedSteps(tokens[:count], planned_at, times, durations[:count], in_flight)

    def _sample_steps(self, count: int, num_rows: int) -> npt.NDArray[np.int32]:
        """Return the tokens of so many steps in turn, [steps, rows]."""
        if self._num_used + count * num_rows <= _NUM_RANDOM:
            return self._sample(count * num_rows).reshape(count, num_rows)
        return np.stack([self._sample(num_rows) for _ in range(count)])

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
        on_equal_steps: Callable[[IntArray, Sequence[float]], None] | None = None,
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
            count, released = self.scheduler.plan_equal_steps(_MOST_EQUAL_STEPS)
            if count:
                steps = self._ranks.repeat(count, until, released)
                self._on_equal_steps(self.scheduler.run_equal_steps(steps), steps.done_at)
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
