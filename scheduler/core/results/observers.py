"""Observers of step results: times, costs and drafts, which later plans depend on, and suspects of failures."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from ....proto.block_tables import IntArray
from ....proto.step import StepResult
from ...speculation.draft_switch import DraftSwitch
from ...speculation.jump_forward import JumpForward
from ..state import SchedulerState
from ..steps.in_flight import InFlightStep


class StepObserver(Protocol):
    def observe(self, step: InFlightStep, result: StepResult, now: float) -> None:
        """Learn from the result of a step that computed tokens, before it is applied to the sequences."""
        ...


class TimeObserver:
    """Measures the throughput, the pace and the times of single steps."""

    def __init__(self, state: SchedulerState) -> None:
        self._throughput, self._pace, self._step_times = state.throughput, state.pace, state.step_times

    def observe(self, step: InFlightStep, result: StepResult, now: float) -> None:
        num_tokens = step.num_tokens + result.token_ids.size - step.rows.size  # with accepted drafts
        seconds = self._throughput.count_step(num_tokens, step.planned_at, now)
        self._pace.observe_step(seconds, is_done=step.has_results)
        self._step_times.observe(step.num_tokens, step.planned_at, now, is_typical=not step.encodes)

    def observe_decoded(self, num_rows: int, planned_at: float, now: float) -> None:
        """Learn from a step that decoded a token of each row, and did nothing else."""
        seconds = self._throughput.count_step(num_rows, planned_at, now)
        self._pace.observe_step(seconds)
        self._step_times.observe(num_rows, planned_at, now)


class CostObserver:
    """Updates the cost model from steps full of prompt tokens, and from steps without any.

    A step of few tokens takes as long as one of many, so it does not show how fast prompts are computed.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._costs, self._max_num_tokens = state.costs, state.config.scheduler.max_num_batched_tokens

    def observe(self, step: InFlightStep, result: StepResult, now: float) -> None:
        seconds = sum(result.stage_times.get(stage, 0.0) for stage in ("forward", "sample"))
        if 2 * step.num_prompt_tokens >= self._max_num_tokens or self._costs.has_launched:
            self._costs.observe(step.num_tokens, seconds, is_done=step.has_results)
        elif not step.num_prompt_tokens:
            self._costs.observe_decode(seconds)


class SuspectObserver:
    """Clears the suspects of failures whose steps succeed."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def observe(self, step: InFlightStep, result: StepResult, now: float) -> None:
        if not self._state.quarantine.is_active:
            return
        done = (*step.rows.tolist(), *step.pooled_rows)
        rows = (row for row in done if self._state.rows.entered_at_step[row] <= step.step_id)
        self._state.quarantine.on_sampled({self._state.running[row].arrival for row in rows})


class DraftObserver:
    """Counts drafts, and measures whether steps with them take less time per token.

    A step with prompts takes longer, and is not measured. The time is that since the result of the step before, if
    that had no prompts either. This includes what the step's own time leaves out: applying the result before, and
    sending its tokens. A step without drafts does so once per token.
    """

    def __init__(self, state: SchedulerState, drafts: DraftSwitch | JumpForward) -> None:
        self._state, self._drafts = state, drafts
        self._applied_at = -math.inf
        self._has_decoded = False  # the step before had no prompts: rows went on decoding at once

    def observe(self, step: InFlightStep, result: StepResult, now: float) -> None:
        since = self._applied_at if self._has_decoded else max(step.planned_at, self._applied_at)
        self._applied_at, self._has_decoded = now, not step.chunk_rows
        has_drafts = step.draft_lens is not None
        if step.rows.size and not step.chunk_rows:
            self._drafts.observe_step(
                step.rows.size, result.token_ids.size, now - since, has_drafts=has_drafts
            )
        if step.draft_lens is not None:
            self._count(step, step.draft_lens, result)

    def _count(self, step: InFlightStep, num_planned: IntArray, result: StepResult) -> None:
        state, num_drafted = self._state, result.num_drafted
        if num_drafted.size:
            state.stats.count_drafts(num_drafted, num_accepted(result, num_planned.size))
        if state.jump_forward is not None:
            had_room = (num_planned > 0) & (state.rows.entered_at_step[step.rows] <= step.step_id)
            num_jump_forward = num_drafted if num_drafted.size else np.zeros_like(num_planned)
            state.jump_forward.observe(step.rows[had_room], num_jump_forward[had_room])


def num_accepted(result: StepResult, num_rows: int) -> IntArray:
    """Return the accepted drafted tokens of each row that sampled."""
    return result.token_counts - 1 if result.token_counts.size else np.zeros(num_rows, np.int32)
