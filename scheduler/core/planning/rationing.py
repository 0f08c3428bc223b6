"""Rationing: divides scarce blocks among running sequences, and chooses the sequences to preempt for them."""

from __future__ import annotations

from ...sequences.sequence import Sequence
from ..queue.policy import by_precedence, choose_victim
from ..state import SchedulerState, row_of
from .plan_builder import PlanBuilder


def ration_blocks(
    state: SchedulerState, builder: PlanBuilder, needs: dict[int, int], chunks: dict[int, int]
) -> tuple[set[int], set[int]]:
    """Allocate scarce blocks in order of precedence, and preempt sequences of lower precedence for them.

    A victim is in the partition of its beneficiary. Its blocks may still be fenced (their release is deferred until
    the steps in flight are done), or it has a state that waits for these steps. Then the beneficiary, and all
    sequences of the partition after it, stall: they skip this step.

    Args:
        needs: row |-> blocks that it lacks.
        chunks: row |-> its prompt tokens in this step; other rows compute one token.

    Returns:
        The rows that were preempted, and the rows that stall.
    """
    blocks = state.blocks
    preempted: set[int] = set()
    stalled: set[int] = set()
    full: set[int] = set()  # partitions
    needy = [state.running[row] for row in needs]
    for sequence in sorted(needy, key=by_precedence):
        row = sequence.row
        if row is None:  # preempted for an earlier one just now
            continue
        partition = blocks.rows.partition_of(row)
        while blocks.pool.num_unheld_in(partition) + _num_leaving_blocks(state, partition) < needs[row]:
            victim = find_victim(state, builder, sequence, partition)
            if victim is None:
                break
            preempted.add(row_of(victim))
            state.preempt(victim, builder.now)
        if partition in full or blocks.pool.num_free_in(partition) < needs[row]:
            stalled.add(row)
            full.add(partition)
        else:
            grow(state, builder, row, chunks.get(row, 1))
    return preempted, stalled


def find_victim(
    state: SchedulerState, builder: PlanBuilder, beneficiary: Sequence, partition: int | None
) -> Sequence | None:
    """Return the sequence to preempt for `beneficiary`, or None; excludes sequences already in this plan.

    If there is no other, it is a beam of the beneficiary's own search whose candidates are known already: its
    preemption delays nothing.

    Args:
        partition: of the blocks that the beneficiary lacks; None if it lacks a row.
    """
    rows, blocks = state.rows, state.blocks
    in_plan = builder.rows(rows.num_rows)
    others = [
        sequence
        for row, sequence in state.running.items()
        if row not in in_plan
        and row not in state.leaving
        and partition in (None, blocks.rows.partition_of(row))
    ]
    victim = choose_victim(others, beneficiary, lambda sequence: int(rows.num_scheduled[row_of(sequence)]))
    if victim is None and beneficiary.beams is not None:
        own = [s for s in others if s.beams is beneficiary.beams and not s.beams.is_waiting_for(s.seq_id)]
        victim = max(own, key=lambda sequence: sequence.seq_id, default=None)
    return victim


def _num_leaving_blocks(state: SchedulerState, partition: int) -> int:
    """Return the blocks of a partition that rows will release which wait for their preemption."""
    rows = state.blocks.rows
    return sum(rows.held_ids(row).size for row in state.leaving if rows.partition_of(row) == partition)


def grow(state: SchedulerState, builder: PlanBuilder, row: int, num_tokens: int) -> None:
    """Allocate the blocks that a row's table lacks for its next `num_tokens`."""
    tables, ids = state.blocks.rows.grow(row, int(state.rows.num_scheduled[row]) + num_tokens)
    builder.appended_rows += tables
    builder.appended_ids += ids
