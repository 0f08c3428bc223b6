"""PlanBuilder: a plan under construction, which ends as the StepPlan that the ranks get."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ....proto.block_tables import IntArray, RowArray, add_digests
from ....proto.codec import NO_INTS, NO_PAIRS
from ....proto.step import NewSequence, StepPlan
from ..state import SchedulerState
from ..steps.in_flight import NO_ROWS, InFlightStep


@dataclass(slots=True)
class PlanBuilder:
    """A plan under construction.

    Attributes:
        num_tokens_left: tokens that the step may still compute.
        full_partitions: partitions whose running sequences lack blocks: no sequence starts there.
        grown_rows, grown_ids: tables of rows at a block boundary, and the next block of each. They go before
            `appended_rows`. Arrays, which a plan with nothing else appended takes as they are (64 rows: 0.4 us,
            through lists 7 us).
        appended_rows, appended_ids: tables that grow, and their blocks.
        first_rows: rows that will sample their first token after a prefill.
        pooled_rows: pooled rows whose last token is in the step.
        source_rows: rows from which sequences are forked in the step.
        num_drafted: drafted tokens that the step may compute after the newest token of each row that decodes; None
            if there are none.
    """

    step_id: int
    now: float
    num_tokens_left: int
    full_partitions: set[int] = field(default_factory=set)
    grown_rows: IntArray | RowArray = field(default_factory=lambda: NO_ROWS)
    grown_ids: IntArray = field(default_factory=lambda: NO_INTS)
    new: list[NewSequence] = field(default_factory=list)
    appended_rows: list[int] = field(default_factory=list)
    appended_ids: list[int] = field(default_factory=list)
    chunk_rows: list[int] = field(default_factory=list)
    chunk_lens: list[int] = field(default_factory=list)
    first_rows: list[int] = field(default_factory=list)
    pooled_rows: list[int] = field(default_factory=list)
    source_rows: list[int] = field(default_factory=list)
    num_drafted: IntArray | None = None

    def rows(self, num_rows: int) -> set[int]:
        """Return the rows that this plan needs; table t is of row ``t % num_rows``."""
        tables = (*self.grown_rows.tolist(), *self.appended_rows)
        return {*(table % num_rows for table in tables), *self.chunk_rows, *self.source_rows}

    def commit(self, state: SchedulerState, advancing: RowArray, epoch: int) -> StepPlan:
        """Advance the state past the step, and return the plan.

        Args:
            advancing: rows that decode.
        """
        rows = state.rows
        held = _held_rows(rows.decoding, advancing)
        rows.advance(advancing, self.num_drafted)
        sampling, num_drafted = advancing, self.num_drafted
        draft_rows, draft_lens = _drafting(advancing, num_drafted)
        if self.first_rows:
            first = np.asarray(self.first_rows, np.intp)
            rows.start_decoding(first)
            sampling = np.concatenate([advancing, first])
            order = np.argsort(sampling)
            sampling = sampling[order]
            if num_drafted is not None:
                num_drafted = np.append(num_drafted, np.zeros_like(first, np.int32))[order]
        if rows.num_beam_rows:
            rows.freeze(sampling[rows.is_beam[sampling]])
        num_tokens = int(advancing.size) + sum(self.chunk_lens)
        media_drops, encodes, encode_shares = state.media.take_orders()
        state.in_flight.add(
            InFlightStep(
                self.step_id,
                sampling,
                self.first_rows,
                num_tokens,
                self.now,
                rows.num_freed,
                num_drafted if draft_rows.size else None,
                tuple(self.chunk_rows),
                tuple(sorted(self.pooled_rows)),
                encodes=tuple(encodes.tolist()),
            )
        )
        trimmed_rows, trimmed_lens = state.deltas.take_trimmed()
        copies, swap_out, swap_in = state.blocks.take_transfers(self.step_id)
        state_moves = state.blocks.state_slots.take(self.step_id)
        released, selected_rows, selected_ids = state.deltas.take()
        loads, drops, slots = ((), NO_INTS, NO_PAIRS) if state.lora is None else state.lora.take_orders()
        tables = state.blocks.tables
        num_slots = tables.num_blocks // tables.num_groups * state.blocks.block_size
        state.stats.count_step(state.blocks.num_held_blocks, num_slots, rows.num_scheduled_tokens)
        return StepPlan(
            step_id=self.step_id,
            epoch=epoch,
            digest=add_digests(tables.digest, state.media.cache.digest),
            released_rows=released,
            new=tuple(self.new),
            trimmed_rows=trimmed_rows,
            trimmed_lens=trimmed_lens,
            appended_rows=_join(self.grown_rows, self.appended_rows),
            appended_ids=_join(self.grown_ids, self.appended_ids),
            copies=copies,
            swap_out=swap_out,
            swap_in=swap_in,
            selected_rows=selected_rows,
            selected_ids=selected_ids,
            held_rows=held,
            chunk_rows=_ints(self.chunk_rows),
            chunk_lens=_ints(self.chunk_lens),
            draft_rows=draft_rows,
            draft_lens=draft_lens,
            lora_loads=loads,
            lora_drops=drops,
            lora_slots=slots,
            keeps_states=self._keeps_states(state),
            state_copies=state_moves.copies,
            state_saves=state_moves.saves,
            save_tails=state_moves.save_tails,
            state_swap_out=state_moves.swap_out,
            state_swap_in=state_moves.swap_in,
            kv=state.kv_moves.take_orders(),
            stored_orders=state.blocks.stored.take_orders(self.now),
            media_drops=media_drops,
            encodes=encodes,
            encode_shares=encode_shares,
        )

    def _keeps_states(self, state: SchedulerState) -> bool:
        """Return whether a draft head is to get the hidden states of the step."""
        switch, num_rows = state.draft_switch, len(state.running)
        return switch is None or switch.keeps_states(self.step_id, num_rows, starts_sequence=bool(self.new))


def _held_rows(decoding: npt.NDArray[np.bool_], advancing: RowArray) -> IntArray:
    """Return the decoding rows that are not in the step."""
    if np.count_nonzero(decoding) == advancing.size:  # 64 rows: 0.3 us, listing them 2 us
        return NO_INTS
    is_held = decoding.copy()
    is_held[advancing] = False
    return is_held.nonzero()[0].astype(np.int32)


def _drafting(rows: RowArray, num_drafted: IntArray | None) -> tuple[IntArray, IntArray]:
    """Return the rows with drafted tokens and the number of these, both int32."""
    if num_drafted is None:
        return NO_INTS, NO_INTS
    has_some = num_drafted > 0
    return rows[has_some].astype(np.int32), num_drafted[has_some]


def _ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32) if values else NO_INTS


def _join(array: IntArray | RowArray, more: list[int]) -> IntArray:
    """Return both as one int32 array."""
    if not array.size:
        return _ints(more)
    joined = np.concatenate([array, np.array(more)]) if more else array
    return joined.astype(np.int32, copy=False)
