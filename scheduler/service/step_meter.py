"""The work of each step, counted from its plan, and the time that the ranks took for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray
from ...proto.replica_status import RankStatus
from ...proto.step import EncoderInput, StepPlan, StepResult
from .worker_group import Rebuilt, WorkerGroup


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a step.

    Attributes:
        num_tokens: prompts' and decoded ones.
        num_sequences: rows in the step.
        num_read_tokens: tokens whose KV is read: for each row the length of its sequence.
        num_pairs: (computed token of a prompt, token that it attends to).
        num_new: sequences that begin in the step.
        num_ended: sequences that have ended since the step before.
    """

    num_tokens: int
    num_sequences: int
    num_read_tokens: int
    num_pairs: int = 0
    num_new: int = 0
    num_ended: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that was run, and its seconds."""

    work: StepWork
    seconds: float


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
        if plan.command is not None:
            decoding[:] = False
        if plan.released_rows.size:
            decoding[plan.released_rows] = False
        for new in plan.new:
            self._num_known[new.row] = new.num_tokens
            num_computed[new.row] = new.num_computed_tokens
        is_active = decoding
        if plan.held_rows.size:
            is_active = decoding.copy()
            is_active[plan.held_rows] = False
        active = is_active.nonzero()[0]
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

    def release(self, rows: IntArray) -> None:
        """Count rows as ended."""
        self._decoding[rows] = False

    def decoding(self) -> tuple[int, int]:
        """Return the number of rows that decode, and the tokens whose KV they have read together."""
        active = np.flatnonzero(self._decoding)
        return active.size, int(self._num_computed[active].sum())

    def repeat(self, count: int) -> None:
        """Count so many steps in which all rows that decode compute a token."""
        self._num_computed[self._decoding] += count


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
        self._num_rows, self._meter = num_rows, PlanMeter(num_rows)
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
        rebuilt = self._ranks.rebuild(epoch)
        self._meter = PlanMeter(self._num_rows)
        self._began.clear()
        self.rest()
        return rebuilt

    def statuses(self) -> tuple[RankStatus, ...]:
        return self._ranks.statuses()

    def close(self) -> None:
        self._ranks.close()
