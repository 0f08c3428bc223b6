"""EqualSteps: plans and applies many equal decode steps at once, for simulations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....proto.block_tables import IntArray, RowArray
from ....proto.step import StepResult
from ..queue.kv_moves import NoKvMoves
from ..state import SchedulerState
from ..steps.in_flight import InFlightStep
from .observers import TimeObserver
from .result_processor import ResultProcessor


@dataclass(frozen=True, slots=True)
class DecodedSteps:
    """Results of equal steps.

    Attributes:
        token_ids: [steps, rows].
        planned_at: of each step that is planned.
        done_at, seconds: of each result that is applied; those of steps in flight come first.
        in_flight: result of the step that is in flight before them; None without.
    """

    token_ids: IntArray
    planned_at: Sequence[float]
    done_at: Sequence[float]
    seconds: Sequence[float]
    in_flight: StepResult | None

    def after_first(self) -> DecodedSteps:
        """Return the steps but the first."""
        return DecodedSteps(self.token_ids[1:], self.planned_at[1:], self.done_at[1:], self.seconds[1:], None)


class EqualSteps:
    """Decode steps in which each running row computes one token, no row ends and no other one starts.

    Most steps of a simulation are of this kind: 22 of 24 between two arrivals of azure_conv. `count` tells how many
    follow, and `run` has the effect of planning and applying them in turn, except for which of the free blocks each
    row gets. The blocks are the same ones, so that the prefix cache loses the same content.

    The step in flight before them may have prompts, or be the last that uses blocks of an ended sequence. Then its
    result comes between the plans of the first and the second of them, as it does in turn: the blocks are free for
    the second, not for the first.
    """

    def __init__(self, state: SchedulerState, processor: ResultProcessor) -> None:
        self._state, self._processor = state, processor
        self._times = TimeObserver(state)
        config, blocks = state.config, state.blocks
        self._num_before = config.scheduler.max_steps_in_flight - 1
        self._is_simple = (
            config.parallel.pipeline_parallel_size == 1
            and state.draft_switch is None
            and state.lora is None
            and isinstance(state.kv_moves, NoKvMoves)
            and config.model.vision is None
            and blocks.num_groups == 1
            and not (blocks.layout.has_windows or blocks.state_slots.is_on or blocks.stored.is_on)
            and blocks.host is None
        )

    def count(self, most: int) -> int:
        """Return the number of such steps that can be planned now, at most `most`."""
        state, rows = self._state, self._state.rows
        if not self._is_simple or len(state.in_flight) != self._num_before or not self._is_quiet:
            return 0
        advancing = rows.advancing()
        if not advancing.size or rows.stops_at_eos[advancing].any():
            return 0
        for step in state.in_flight:
            # The same rows sample in it, so that its result ends none of them.
            if not np.array_equal(step.rows, advancing) or step.pooled_rows or step.draft_lens is not None:
                return 0
        if self._num_before > 1 and self._must_apply_first:
            return 0
        # The last token of a row may be planned, if its result comes after those of the other steps.
        count = min(most, rows.num_safe_tokens + (self._num_before > 0))
        while count > 0 and state.blocks.rows.lacking_partitions(self._growing(advancing, count), {}):
            count //= 2
        return max(0, count)

    @property
    def _is_quiet(self) -> bool:
        """Return whether nothing waits that a plan would take up, but for rows to release."""
        state, rows = self._state, self._state.rows
        starts_none = not state.waiting or (not rows.num_free and state.config.scheduler.policy == "fcfs")
        return (
            starts_none
            and len(state.requests.gateways) == 1
            and not (state.prefilling or state.parents or state.detectors or state.has_deadlines)
            and not (rows.num_beam_rows or rows.num_own_stop_rows or state.num_prefill_only)
            and not (state.deltas.has_changed_rows or state.outbox)
            and not (state.quarantine.is_active or state.costs.has_launched)
            and (state.jump_forward is None or not state.jump_forward.num_rows)
        )

    @property
    def _must_apply_first(self) -> bool:
        """Return whether the result of a step in flight does more than add a token to each row."""
        is_plain = all(not step.chunk_rows for step in self._state.in_flight)
        return not is_plain or self._state.blocks.num_fenced_blocks > 0

    def _growing(self, rows: RowArray, count: int) -> RowArray:
        """Return each row as often as it lacks a block in the next `count` steps."""
        blocks = self._state.blocks
        lacking = (
            -(-(self._state.rows.num_scheduled[rows] + count) // blocks.block_size) - blocks.tables.lens[rows]
        )
        return np.repeat(rows, lacking)

    def take_released(self) -> IntArray:
        """Return the rows that the first of the steps releases, and forget them."""
        return self._state.deltas.take()[0]

    def run(self, steps: DecodedSteps) -> IntArray:
        """Plan as many steps, at most `count`, and apply as many results; return the rows' handles."""
        state, rows, num_planned = self._state, self._state.rows.advancing(), 0
        state.blocks.begin_plan()
        oldest = state.in_flight.oldest
        if oldest is not None and self._must_apply_first:
            self._plan_one(rows)
            num_planned = 1
            if oldest.chunk_rows:
                self._apply_prompts(rows, steps)
                steps, num_planned = steps.after_first(), 0
            else:
                state.blocks.free_fenced(oldest.step_id)
        self._plan(rows, len(steps.planned_at) - num_planned)
        if steps.planned_at:
            self._apply(rows, steps)
        handles: IntArray = state.rows.handle[rows]
        return handles

    def _plan_one(self, rows: RowArray) -> None:
        """Advance the state past a step, and count it."""
        state, blocks = self._state, self._state.blocks
        full = rows[blocks.tables.lens[rows] * blocks.block_size == state.rows.num_scheduled[rows]]
        if full.size:
            blocks.rows.grow_by_one(full)
        state.rows.advance(rows)
        num_slots = blocks.tables.num_blocks * blocks.block_size
        state.stats.count_step(blocks.num_held_blocks, num_slots, state.rows.num_scheduled_tokens)

    def _plan(self, rows: RowArray, count: int) -> None:
        """Advance the state past so many steps, and count them."""
        if not count:
            return
        self._count_plans(rows, count)
        growing = self._growing(rows, count)
        if growing.size:
            self._state.blocks.rows.grow_by_one(growing)
        self._state.rows.advance_by(rows, count)

    def _apply_prompts(self, rows: RowArray, steps: DecodedSteps) -> None:
        """Apply the result of a step with prompts, after the first of the steps was planned.

        It ends no sequence, and the caller sends its tokens with those of the steps.
        """
        state = self._state
        assert steps.in_flight is not None, "a step is in flight, and its result is missing"
        state.in_flight.add(self._make_step(rows, steps.planned_at[0]))
        self._processor.apply(self._processor.due_step(steps.in_flight), steps.in_flight, steps.done_at[0])
        state.stats.count_gap(0.0)

    def _make_step(self, rows: RowArray, planned_at: float) -> InFlightStep:
        state = self._state
        return InFlightStep(
            state.in_flight.next_id, rows, [], int(rows.size), planned_at, state.rows.num_freed
        )

    def _apply(self, rows: RowArray, steps: DecodedSteps) -> None:
        state = self._state
        begun = [*(step.planned_at for step in state.in_flight), *steps.planned_at]
        for began_at, now, seconds in zip(begun, steps.done_at, steps.seconds, strict=False):
            self._times.observe_decoded(int(rows.size), began_at, now)
            state.costs.observe_decode(seconds)
            state.stats.count_gap(0.0)
        state.in_flight.repeat(self._make_step(rows, 0.0), steps.planned_at)
        for own, starts, tokens in state.rows.append_steps(rows, steps.token_ids):
            self._processor.publish(own, tokens.tobytes(), starts)

    def _count_plans(self, rows: RowArray, count: int) -> None:
        """Count the plans in the statistics, each with the blocks that it holds."""
        blocks, size = self._state.blocks, self._state.blocks.block_size
        # The steps, from 0, in which the rows first lack a block, and their number of new blocks in each step.
        first = blocks.tables.lens[rows] * size - self._state.rows.num_scheduled[rows]
        lacks = first[:, None] + size * np.arange(1 + count // size)
        num_new = np.cumsum(np.bincount(lacks[lacks < count], minlength=count)).tolist()
        num_held, num_blocks = blocks.num_held_blocks, blocks.tables.num_blocks
        num_tokens = self._state.rows.num_scheduled_tokens
        for new in num_new:
            num_tokens += int(rows.size)
            self._state.stats.count_step(num_held + new, (num_blocks + new) * size, num_tokens)
