"""EqualSteps: plans and applies many equal decode steps at once, for simulations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....proto.block_tables import IntArray, RowArray
from ..queue.kv_moves import NoKvMoves
from ..state import SchedulerState
from .observers import TimeObserver
from .result_processor import ResultProcessor


class EqualSteps:
    """Decode steps in which each running row computes one token, no row ends and no other one starts.

    Most steps of a simulation are of this kind: 22 of 24 between two arrivals of azure_conv. `count` tells how many
    follow, and `run` has the effect of planning and applying them in turn, except for which of the free blocks each
    row gets. The blocks are the same ones, so that the prefix cache loses the same content.
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
            is_same = step.rows.size == advancing.size and not (step.first_rows or step.chunk_rows)
            if not is_same or not np.array_equal(step.rows, advancing):
                return 0
        count = min(most, rows.num_safe_tokens)
        while count > 0 and state.blocks.rows.lacking_partitions(self._growing(advancing, count), {}):
            count //= 2
        return max(0, count)

    @property
    def _is_quiet(self) -> bool:
        """Return whether nothing waits that a plan would take up."""
        state, rows = self._state, self._state.rows
        starts_none = not state.waiting or (not rows.num_free and state.config.scheduler.policy == "fcfs")
        return (
            starts_none
            and len(state.requests.gateways) == 1
            and not (state.prefilling or state.parents or state.detectors or state.has_deadlines)
            and not (rows.num_beam_rows or rows.num_own_stop_rows or state.blocks.num_fenced_blocks)
            and not (state.deltas or state.outbox)
            and not (state.quarantine.is_active or state.costs.has_launched)
            and (state.jump_forward is None or not state.jump_forward.num_rows)
        )

    def _growing(self, rows: RowArray, count: int) -> RowArray:
        """Return each row as often as it lacks a block in the next `count` steps."""
        blocks = self._state.blocks
        lacking = (
            -(-(self._state.rows.num_scheduled[rows] + count) // blocks.block_size) - blocks.tables.lens[rows]
        )
        return np.repeat(rows, lacking)

    def run(
        self, token_ids: IntArray, planned_at: Sequence[float], done_at: Sequence[float]
    ) -> tuple[bytes, IntArray]:
        """Plan as many steps, at most `count`, and apply as many results; return the gateway and the rows' handles.

        Args:
            token_ids: [steps, rows], of the results.
            planned_at, done_at: of each step that is planned, and of each result that is applied.
        """
        state, count = self._state, len(planned_at)
        rows = state.rows.advancing()
        self._count_plans(rows, count)
        state.blocks.begin_plan()
        growing = self._growing(rows, count)
        if growing.size:
            state.blocks.rows.grow_by_one(growing)
        state.rows.advance_by(rows, count)
        begun = [*(step.planned_at for step in state.in_flight), *planned_at]
        for began_at, now in zip(begun, done_at, strict=False):
            self._times.observe_decoded(int(rows.size), began_at, now)
            state.stats.count_gap(0.0)
        state.in_flight.repeat(planned_at)
        self._append(rows, token_ids)
        return next(iter(state.requests.gateways)), state.rows.handle[rows]

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

    def _append(self, rows: RowArray, token_ids: IntArray) -> None:
        """Append a column of tokens to each row, and publish the blocks that are full."""
        state, block_size = self._state.rows, self._state.rows.block_size
        num_steps = len(token_ids)
        num_done = np.zeros(rows.size, np.int64)
        while True:
            room = block_size - (state.num_tokens[rows] - state.num_flushed[rows])
            is_left = num_done < num_steps
            full = is_left & (room == 0)
            if full.any():
                self._processor.flush(rows[full])
                room[full] = block_size
            lens = np.minimum(num_steps - num_done, room)[is_left]
            if not lens.size:
                return
            columns = np.flatnonzero(is_left)
            starts = np.cumsum(lens) - lens
            places = np.arange(int(lens.sum())) + np.repeat(num_done[is_left] - starts, lens)
            tokens = token_ids[places, np.repeat(columns, lens)]
            appended = state.append_runs(np.repeat(rows[columns], lens), tokens, starts, lens)
            assert appended, "tails have no room for what was counted"
            num_done[is_left] += lens
