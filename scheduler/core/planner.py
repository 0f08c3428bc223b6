"""Planner: decides one step. Running sequences first, then prompts under the token budget, then who may start."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.errors import DeadlineExpired
from ...proto.step import NO_INTS, NewSequence, StepPlan
from ..kv.block_manager import Prefix
from ..sequences.sequence import Sequence
from .policy import choose_victim
from .state import InFlight, SchedulerState, row_of

# While others run, admission leaves this share of the pool to their growth: an admission that forces a preemption
# a few steps later costs a prefill.
WATERMARK = 0.01


@dataclass(slots=True)
class _Draft:
    """A plan in the making.

    Attributes:
        budget: tokens that the step may still take.
        first_rows: rows that will sample their first token after a prefill.
    """

    step_id: int
    now: float
    budget: int
    new: list[NewSequence] = field(default_factory=list)
    appended_rows: list[int] = field(default_factory=list)
    appended_ids: list[int] = field(default_factory=list)
    chunk_rows: list[int] = field(default_factory=list)
    chunk_lens: list[int] = field(default_factory=list)
    first_rows: list[int] = field(default_factory=list)


class Planner:
    """Makes the plans of one scheduler's state."""

    def __init__(self, state: SchedulerState, epoch: int) -> None:
        self._state = state
        self._epoch = epoch

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing that could be computed now."""
        state = self._state
        self._end_expired(now)
        while True:
            before = state.stats.num_preemptions
            plan = self._try(now)
            if plan is not None or state.in_flight or state.stats.num_preemptions == before:
                return plan
            # Preemptions alone came of it, and no result will follow: their blocks are free for the next try.

    def _try(self, now: float) -> StepPlan | None:
        state = self._state
        state.blocks.begin_plan()
        advancing = state.advancing_rows()
        draft = _Draft(state.stats.num_steps + 1, now, state.config.scheduler.max_num_batched_tokens)
        draft.budget -= advancing.size
        chunks = self._share_budget(draft)
        advancing = self._find_blocks(draft, advancing, chunks)
        self._plan_chunks(draft, chunks)
        self._start_forks(draft)
        advancing = self._admit(draft, advancing)
        if advancing.size == 0 and not draft.chunk_rows:
            return None
        return self._commit(draft, advancing)

    def _end_expired(self, now: float) -> None:
        for sequence in self._state.expired(now):
            if sequence.seq_id in self._state.alive:  # not ended with another of its request just now
                error = DeadlineExpired(
                    f"request {sequence.request_id}: its deadline passed before it was complete"
                )
                self._state.fail_request((sequence.gateway, sequence.handle), error.grpc_status, str(error))

    # Those that run

    def _share_budget(self, draft: _Draft) -> dict[int, int]:
        """Continues prefills, oldest first: row |-> tokens in this step."""
        chunks: dict[int, int] = {}
        for sequence in self._state.prefilling:
            if draft.budget <= 0:
                break
            row = row_of(sequence)
            left = len(sequence.token_ids) - int(self._state.rows.num_scheduled[row])
            chunks[row] = min(draft.budget, left)
            draft.budget -= chunks[row]
        return chunks

    def _find_blocks(self, draft: _Draft, advancing: IntArray, chunks: dict[int, int]) -> IntArray:
        """Gives blocks to all that need them in this step; takes those that get none out of the step.

        Returns:
            The rows of `advancing` that stay. `chunks` is changed in place.
        """
        blocks, num_scheduled = self._state.blocks, self._state.rows.num_scheduled
        full = blocks.tables.lens[advancing] * blocks.block_size == num_scheduled[advancing]
        at_boundary = advancing[full]
        needs = {
            row: blocks.num_lacking_blocks(row, int(num_scheduled[row]) + n) for row, n in chunks.items()
        }
        if at_boundary.size + sum(needs.values()) <= blocks.num_free_blocks:
            new_ids = blocks.grow_by_one(at_boundary)
            draft.appended_rows += at_boundary.tolist()
            draft.appended_ids += new_ids.tolist()
            return advancing
        needs |= dict.fromkeys(at_boundary.tolist(), 1)
        out = self._ration(draft, needs, chunks)
        staying = advancing[~np.isin(advancing, list(out))]
        draft.budget += advancing.size - staying.size + sum(chunks.pop(row) for row in out & chunks.keys())
        if staying.size or chunks or self._state.in_flight:
            draft.budget = 0  # nobody is admitted into a full pool
        return staying

    def _ration(self, draft: _Draft, needs: dict[int, int], chunks: dict[int, int]) -> set[int]:
        """Too few blocks for all: those that go first get theirs first, at the cost of those that go last.

        The victims' blocks may still be fenced by steps in flight. Then their beneficiary, and all after it, sit
        this step out.

        Returns:
            Rows that do not take part in this step: preempted, or without blocks.
        """
        state, blocks = self._state, self._state.blocks
        out: set[int] = set()
        stalled = False
        needy = [state.running[row] for row in needs]
        for sequence in sorted(needy, key=lambda s: (-s.priority, s.arrival, s.seq_id)):
            row = sequence.row
            if row is None:  # preempted by one before it just now
                continue
            while blocks.num_unheld_blocks < needs[row]:
                victim = self._victim_of(draft, sequence)
                if victim is None:
                    break
                out.add(row_of(victim))
                state.preempt(victim, draft.now)
            stalled = stalled or blocks.num_free_blocks < needs[row]
            if stalled:
                out.add(row)
            else:
                self._grow(draft, row, chunks.get(row, 1))
        return out

    def _victim_of(self, draft: _Draft, beneficiary: Sequence) -> Sequence | None:
        """Who gives way; nobody of whom the draft says something already.

        If nobody else, then a beam of the beneficiary's own search whose candidates are in: that holds up nothing.
        """
        rows, spoken_of = self._state.rows, {*draft.appended_rows, *draft.chunk_rows}
        others = [sequence for row, sequence in self._state.running.items() if row not in spoken_of]
        victim = choose_victim(
            others, beneficiary, lambda sequence: int(rows.num_scheduled[row_of(sequence)])
        )
        if victim is None and beneficiary.beams is not None:
            own = [s for s in others if s.beams is beneficiary.beams and not s.beams.is_waiting_for(s.seq_id)]
            victim = max(own, key=lambda sequence: sequence.seq_id, default=None)
        return victim

    def _grow(self, draft: _Draft, row: int, num_tokens: int) -> None:
        """Makes room in a row's table for its next `num_tokens`."""
        ids = self._state.blocks.grow(row, int(self._state.rows.num_scheduled[row]) + num_tokens)
        draft.appended_rows += [row] * len(ids)
        draft.appended_ids += ids

    def _plan_chunks(self, draft: _Draft, chunks: dict[int, int]) -> None:
        state = self._state
        for row, num_tokens in chunks.items():
            self._grow(draft, row, num_tokens)
            self._plan_chunk(draft, state.running[row], num_tokens)
        if chunks:
            state.prefilling = [sequence for sequence in state.prefilling if self._has_prompt_left(sequence)]

    def _plan_chunk(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        """The next `num_tokens` of a prompt, whose blocks the row has, are part of the step."""
        row = row_of(sequence)
        start = int(self._state.rows.num_scheduled[row])
        self._state.rows.num_scheduled[row] = start + num_tokens
        self._state.blocks.publish(row, sequence, start, start + num_tokens)
        draft.chunk_rows.append(row)
        draft.chunk_lens.append(num_tokens)
        if not self._has_prompt_left(sequence):
            draft.first_rows.append(row)

    def _has_prompt_left(self, sequence: Sequence) -> bool:
        row = sequence.row
        return row is not None and int(self._state.rows.num_scheduled[row]) < len(sequence.token_ids)

    # Those that start

    def _start_forks(self, draft: _Draft) -> None:
        """Starts the children of beams, and the siblings whose leader's prompt an earlier step computes."""
        state = self._state
        forks, state.forks = state.forks, []
        for child, parent in forks:
            if not self._start_fork(draft, child, parent, len(child.token_ids) - 1):
                child.has_run = True  # it goes where its parent was: before all that never ran
                state.waiting.push(child)
        for leader in list(state.leaders):
            if not state.rows.decoding[row_of(leader)]:
                continue
            while leader.siblings:
                sibling = leader.siblings[0]
                if not self._start_fork(draft, sibling, leader, leader.num_prompt_tokens - 1):
                    break
                sibling.leader = None
                leader.siblings.pop(0)
            if not leader.siblings:
                state.leaders.remove(leader)

    def _start_fork(self, draft: _Draft, child: Sequence, parent: Sequence, num_tokens: int) -> bool:
        """Starts a sequence on the first `num_tokens` of a running one, all but one of its own; False: no room."""
        state = self._state
        needed = state.blocks.num_blocks_for(num_tokens + 1) - num_tokens // state.blocks.block_size
        if (
            parent.row is None
            or draft.budget < 1
            or not state.rows.num_free
            or needed > state.blocks.num_free_blocks
        ):
            return False
        row = state.rows.take(child.token_ids, child.limit, draft.step_id)
        state.blocks.open_fork(row, parent.row, num_tokens)
        self._begin(draft, child, row, num_tokens)
        return True

    def _admit(self, draft: _Draft, advancing: IntArray) -> IntArray:
        """Starts waiting sequences, in order, while rows, blocks and the token budget last.

        Returns:
            The rows of `advancing` that were not preempted for one of higher priority.
        """
        state, blocks = self._state, self._state.blocks
        before = state.stats.num_preemptions
        while draft.budget > 0 and (sequence := state.waiting.peek()) is not None:
            if self._is_too_late(sequence, draft.now):
                continue
            prefix, wanted = self._prefix_of(sequence)
            wanted += int(WATERMARK * blocks.num_blocks) if state.running else 0
            if state.rows.num_free and wanted <= blocks.num_free_blocks:
                state.waiting.remove(sequence)
                self._start(draft, sequence, prefix)
            elif not self._make_room(draft, sequence, wanted, stuck=not (advancing.size or draft.chunk_rows)):
                break
        if state.stats.num_preemptions == before:
            return advancing
        return advancing[state.rows.entered_at_step[advancing] < draft.step_id]

    def _prefix_of(self, sequence: Sequence) -> tuple[Prefix, int]:
        """What memory holds of a waiting sequence's beginning, and the free blocks that it takes to start."""
        blocks, num_tokens = self._state.blocks, len(sequence.token_ids) + 1
        prefix = blocks.find_prefix(sequence) if not sequence.host_blocks else Prefix()
        wanted = blocks.num_blocks_to_open(prefix, num_tokens)
        if prefix.partial is not None and wanted > blocks.num_free_blocks:
            # A copy needs its source as well for a moment: one block more than there may be.
            prefix = Prefix(prefix.blocks)
            wanted = blocks.num_blocks_to_open(prefix, num_tokens)
        return prefix, wanted

    def _is_too_late(self, sequence: Sequence, now: float) -> bool:
        """Ends a waiting sequence whose prompt alone takes longer than its deadline leaves."""
        if sequence.deadline is None or sequence.has_run:
            return False
        if now + self._state.costs.prefill_s(len(sequence.token_ids)) <= sequence.deadline:
            return False
        error = DeadlineExpired(
            f"request {sequence.request_id}: its prompt cannot be computed before its deadline"
        )
        self._state.fail_request((sequence.gateway, sequence.handle), error.grpc_status, str(error))
        return True

    def _make_room(self, draft: _Draft, sequence: Sequence, num_blocks: int, stuck: bool) -> bool:
        """Preempts one that runs, for a waiting sequence that lacks a row or blocks; False where it may not.

        It may where the policy is ``priority`` and its victim's is lower. And it may where nothing else gets on:
        then all that run are beams, frozen until others of their search, which wait as well, have been computed.
        """
        state = self._state
        if state.rows.num_free and num_blocks <= state.blocks.num_unheld_blocks:
            return False  # enough, as soon as the steps in flight are done
        victim = self._victim_of(draft, sequence)
        stuck = stuck and not state.in_flight
        by_priority = state.config.scheduler.policy == "priority"
        if victim is None or not (stuck or (by_priority and victim.priority < sequence.priority)):
            return False
        state.preempt(victim, draft.now)
        return True

    def _start(self, draft: _Draft, sequence: Sequence, prefix: Prefix) -> None:
        """Gives a waiting sequence a row and the first chunk of its tokens."""
        state, blocks = self._state, self._state.blocks
        row = state.rows.take(sequence.token_ids, sequence.limit, draft.step_id)
        if sequence.host_blocks:
            num_cached_tokens = sequence.num_host_tokens
            blocks.swap_in(row, sequence.host_blocks)
            sequence.host_blocks = []
        else:
            num_cached_tokens = blocks.open(row, sequence, prefix)
        if not sequence.has_run:
            state.waiting.charge(sequence.tenant, len(sequence.token_ids), 0)
        self._begin(draft, sequence, row, num_cached_tokens)
        if self._has_prompt_left(sequence):
            state.prefilling.append(sequence)
            state.prefilling.sort(key=lambda s: (-s.priority, s.arrival, s.seq_id))

    def _begin(self, draft: _Draft, sequence: Sequence, row: int, num_cached_tokens: int) -> None:
        """Puts a sequence into its row, whose table has its first tokens, and plans its first chunk."""
        state = self._state
        state.enter(sequence, row, num_cached_tokens, draft.now)
        num_tokens = min(draft.budget, len(sequence.token_ids) - num_cached_tokens)
        draft.budget -= num_tokens
        state.blocks.grow(row, num_cached_tokens + num_tokens)
        draft.new.append(
            NewSequence(
                row=row,
                seq_id=sequence.seq_id,
                token_ids=np.frombuffer(sequence.token_ids.tobytes(), np.int32),
                num_computed_tokens=num_cached_tokens,
                block_ids=state.blocks.tables.row(row).copy(),
                sampling=sequence.row_sampling(),
            )
        )
        self._plan_chunk(draft, sequence, num_tokens)

    # The plan

    def _commit(self, draft: _Draft, advancing: IntArray) -> StepPlan:
        """Moves the state on to after the step, and writes the plan."""
        state, rows = self._state, self._state.rows
        held = np.flatnonzero(rows.decoding).astype(np.int32)
        held = NO_INTS if held.size == advancing.size else held[~np.isin(held, advancing)]
        rows.num_scheduled[advancing] += 1
        sampling = advancing
        if draft.first_rows:
            first = np.asarray(draft.first_rows, np.int32)
            rows.decoding[first] = True
            sampling = np.sort(np.concatenate([advancing, first]))
        beams = sampling[rows.is_beam[sampling]]
        rows.frozen[beams] = True
        exhausted = (rows.num_scheduled[advancing] >= rows.limit[advancing] - 1).any()
        if draft.first_rows or beams.size or exhausted:
            state.invalidate_advancing_rows()
        num_tokens = int(advancing.size) + sum(draft.chunk_lens)
        state.in_flight.append(InFlight(draft.step_id, sampling, draft.first_rows, num_tokens, draft.now))
        copies, swap_out, swap_in = state.blocks.take_transfers(draft.step_id)
        released, state.released = state.released, []
        chosen, state.chosen = state.chosen, []
        tables = state.blocks.tables
        num_slots = int(tables.lens.sum()) * state.blocks.block_size
        state.stats.count_step(state.blocks.num_held_blocks, num_slots, int(rows.num_scheduled.sum()))
        return StepPlan(
            step_id=draft.step_id,
            epoch=self._epoch,
            digest=tables.digest,
            released_rows=np.asarray(released, np.int32),
            new=tuple(draft.new),
            appended_rows=np.asarray(draft.appended_rows, np.int32),
            appended_ids=np.asarray(draft.appended_ids, np.int32),
            copies=copies,
            swap_out=swap_out,
            swap_in=swap_in,
            chosen_rows=np.array([row for row, _ in chosen], np.int32),
            chosen_ids=np.array([token for _, token in chosen], np.int32),
            held_rows=held,
            chunk_rows=np.asarray(draft.chunk_rows, np.int32),
            chunk_lens=np.asarray(draft.chunk_lens, np.int32),
        )
