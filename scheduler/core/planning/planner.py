"""Planner: plans one step. Running sequences first, then prompts under the token budget, then admissions."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

import numpy as np

from ....proto.block_tables import IntArray, RowArray
from ....proto.codec import NO_INTS
from ....proto.lora import NO_SLOT
from ....proto.step import NewSequence, RowSampling, StepPlan
from ...kv.prefix_lookup import Prefix
from ...sequences.sequence import Sequence
from ...speculation.draft_switch import ends_repeated
from ..admission.forecast import Forecast
from ..state import SchedulerState, row_of
from .placement import MAX_PASSED, Place, Placement
from .plan_builder import PlanBuilder
from .rationing import find_victim, grow, ration_blocks
from .step_groups import StepGroups


class Planner:
    """Plans for one scheduler's state.

    Attributes:
        admits: waiting sequences may start.
    """

    def __init__(self, state: SchedulerState, forecast: Forecast, epoch: int) -> None:
        self._state = state
        self._forecast = forecast
        self.epoch = epoch
        self.admits = True
        self._groups = StepGroups(
            state.config.scheduler.max_num_seqs, state.config.parallel.pipeline_parallel_size
        )

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed now."""
        quarantine = self._state.quarantine
        if quarantine.is_active:
            quarantine.forget_ended({sequence.arrival for sequence in self._state.alive.values()})
        in_groups = self._groups.are_several
        while True:
            plan, preempted = self._try(now, in_groups=in_groups)
            if plan is not None or self._state.in_flight:
                return plan
            if in_groups:
                # Scarce blocks are rationed among all rows then, so that one of them goes on.
                in_groups = False
                continue
            if self._state.lora is not None and self._state.lora.has_changed:
                continue  # a slot became free, or its adapter waits for another turn
            if quarantine.on_trial is not None:
                quarantine.end_trials()  # what the others hold leaves the request on trial no room
            elif not preempted and not (
                self._state.waiting and self.admits and self._state.kv_moves.free_blocks(None)
            ):
                return None
            # The try only preempted, and no result will follow: the freed blocks are available to the next try.

    def _try(self, now: float, *, in_groups: bool) -> tuple[StepPlan | None, set[int]]:
        """Plan once; return the plan, if anything is to be computed, and the rows that were preempted."""
        # The order shares out tokens and blocks, which do not become scarce together:
        # 1. Every decoding row gets its one token before anything else, so that a burst of prompts delays no stream.
        # 2. Started prompts get the tokens that are left, then drafts, of which there are none beside a prompt.
        # 3. Blocks come last, because only now is it known who needs how many. If there are too few, drafts are
        #    given up first, since a preemption costs more than they save; then rows are preempted in favor of rows of
        #    higher precedence. A victim's blocks may be fenced by a step in flight: its beneficiary stalls in this
        #    step, and finds them in a later one. What a row gives up here goes back to the tokens left.
        # 4. Only what is left starts new sequences, whose prompts would otherwise take blocks from running rows. An
        #    admission may preempt rows of lower precedence that already have a token of the step: they leave it.
        # Nothing is sent until `commit`. But rows, blocks and moves are changed at once, so a try that ends without
        # a plan has had its effects, and `plan` repeats it only if no result can come that would change more.
        state = self._state
        state.blocks.begin_plan()
        state.media.begin_plan()
        state.preempt_leaving(now)
        advancing = self._without_others(state.rows.advancing())
        is_alone = not (state.prefilling or state.waiting)
        if in_groups:
            advancing = self._groups.choose(advancing, state.in_flight, waits_for_rows=is_alone)
        builder = PlanBuilder(state.in_flight.next_id, now, state.config.scheduler.max_num_batched_tokens)
        builder.num_tokens_left -= advancing.size
        chunks = self._continue_prefills(builder)
        self._add_drafts(builder, advancing, chunks)
        advancing, preempted = self._allocate_blocks(builder, advancing, chunks)
        self._plan_chunks(builder, chunks)
        self._start_forks(builder)
        for_admission = self._admit(builder, advancing)
        if for_admission:
            staying = ~np.isin(advancing, list(for_admission))
            advancing = advancing[staying]
            builder.num_drafted = None if builder.num_drafted is None else builder.num_drafted[staying]
        computes = bool(advancing.size or builder.chunk_rows)
        must_step = computes or state.media.is_encoding or self._must_load() or self._must_store(now)
        plan = builder.commit(self._state, advancing, self.epoch) if must_step else None
        if plan is not None:
            self._groups.note(state.in_flight.newest_rows(1)[0], plan.step_id)
        return plan, preempted | for_admission

    def _must_load(self) -> bool:
        """Return whether ranks that have nothing to compute have something to read, and report when they have."""
        lora = self._state.lora
        is_loading = (lora is not None and lora.is_loading) or self._state.kv_moves.must_order
        return is_loading and not self._state.in_flight

    def _must_store(self, now: float) -> bool:
        """Begin to write blocks if nothing runs; return whether the ranks have orders or reports of blocks."""
        state = self._state
        if state.in_flight or not state.blocks.stored.is_on:
            return False
        if not state.running:
            state.blocks.tiers.write_behind(now - state.throughput.last_step_at, now)
        return state.blocks.stored.wants_step(now)

    # Trials: while a request is on trial, no other is in a step

    def _may_run(self, sequence: Sequence) -> bool:
        on_trial = self._state.quarantine.on_trial
        return on_trial is None or sequence.arrival == on_trial

    def _without_others(self, rows: RowArray) -> RowArray:
        if self._state.quarantine.on_trial is None:
            return rows
        return rows[[self._may_run(self._state.running[row]) for row in rows.tolist()]]

    def _next_waiting(self, passed: Set[int]) -> Sequence | None:
        """Return the next sequence to start, except those whose seq_ids are in `passed`."""
        if not self.admits:
            return None
        waiting, on_trial = self._state.waiting, self._state.quarantine.on_trial
        return waiting.peek(passed) if on_trial is None else waiting.first_of(on_trial, passed)

    # Running sequences

    def _continue_prefills(self, builder: PlanBuilder) -> dict[int, int]:
        """Share the tokens left among prefills, by precedence; return row |-> tokens in this step."""
        chunks: dict[int, int] = {}
        for sequence in self._state.prefilling:
            if builder.num_tokens_left <= 0:
                break
            if not self._may_run(sequence):
                continue
            row = row_of(sequence)
            num_scheduled = int(self._state.rows.num_scheduled[row])
            if self._lacks_tokens(builder, sequence, num_scheduled):
                builder.num_tokens_left = 0  # others would take them again in the next step
                break
            num_unplanned = len(sequence.token_ids) - num_scheduled
            num_tokens = self._chunk_len(builder, sequence, num_unplanned)
            if num_tokens:
                chunks[row] = num_tokens
                builder.num_tokens_left -= num_tokens
        return chunks

    def _chunk_len(self, builder: PlanBuilder, sequence: Sequence, num_unplanned: int) -> int:
        """Return the tokens of a sequence's next chunk, within which its state is saved once at most.

        It ends before an image that cannot be encoded yet as well: there may be none.
        """
        num_scheduled = int(self._state.rows.num_scheduled[row_of(sequence)])
        to_second = sequence.tokens_to_second_snapshot(num_scheduled)
        most = num_unplanned if to_second is None else min(num_unplanned, to_second)
        num_tokens = min(builder.num_tokens_left, most)
        if self._lacks_tokens(builder, sequence, num_scheduled):
            return 0
        if not sequence.media:
            return num_tokens
        return self._state.media.chunk_len(sequence, num_scheduled, num_tokens, builder.now)

    def _lacks_tokens(self, builder: PlanBuilder, sequence: Sequence, start: int) -> bool:
        """Return whether the step has too few tokens left for a prompt that is computed at once."""
        if not self._state.config.model.sees_whole_prompt:
            return False
        return start < sequence.num_prompt_tokens > start + builder.num_tokens_left

    def _add_drafts(self, builder: PlanBuilder, advancing: RowArray, chunks: dict[int, int]) -> None:
        """Choose how many drafted tokens the ranks may propose, within half of the tokens left: prompts wait too.

        A step with prompts is bound by compute, so it has no drafts.
        """
        rows, switch = self._state.rows, self._state.draft_switch
        if chunks or not advancing.size:
            return
        if switch is None:
            builder.num_drafted = self._room_for_jump_forward(builder, advancing)
        elif switch.is_on(advancing.size):
            limits = self._room_for_drafts(advancing)
            if limits is not None:
                most = builder.num_tokens_left // 2
                builder.num_drafted = switch.choose(rows.entered_at_step[advancing], limits, most)
        if builder.num_drafted is not None:
            builder.num_tokens_left -= sum(builder.num_drafted.tolist())

    def _room_for_drafts(self, rows: RowArray) -> IntArray | None:
        """Return the most drafted tokens of each row. Returns None if the ranks would find nothing to draft."""
        state = self._state
        if not state.min_repeated_len:
            return state.rows.room_for_drafts(rows)
        is_repeated = [self._has_text_to_continue(row) for row in rows.tolist()]
        return np.where(is_repeated, state.rows.room_for_drafts(rows), 0) if any(is_repeated) else None

    def _has_text_to_continue(self, row: int) -> bool:
        """Return whether n-grams or a grammar, which may force text, have tokens to draft."""
        state = self._state
        sequence = state.running[row]
        if sequence.has_grammar:
            return True
        text = state.rows.known_bytes(row, sequence)
        return ends_repeated(text, state.min_repeated_len)

    def _room_for_jump_forward(self, builder: PlanBuilder, advancing: RowArray) -> IntArray | None:
        """Return the most jump-forward tokens of each row.

        The step is no larger than those that a rank has memory and recorded graphs for.
        """
        forced = self._state.jump_forward
        if forced is None or not forced.num_rows:
            return None
        most = min(builder.num_tokens_left // 2, self._state.config.max_decode_tokens - advancing.size)
        limits = self._state.rows.room_for_drafts(advancing)
        return forced.choose(advancing, limits, most, builder.step_id)

    def _drop_drafts(self, builder: PlanBuilder) -> None:
        """Plan no drafted tokens after all: blocks are scarce, and drafts are not worth a preemption."""
        if builder.num_drafted is not None:
            builder.num_tokens_left += sum(builder.num_drafted.tolist())
            builder.num_drafted = None

    def _allocate_blocks(
        self, builder: PlanBuilder, advancing: RowArray, chunks: dict[int, int]
    ) -> tuple[RowArray, set[int]]:
        """Give blocks to all rows that need them in this step; take the rows that get none out of the step.

        Returns:
            The rows of `advancing` that stay in the step, and the rows that were preempted. `chunks` is changed in
            place.
        """
        blocks, num_scheduled = self._state.blocks, self._state.rows.num_scheduled
        full = blocks.tables.lens[advancing] * blocks.block_size == num_scheduled[advancing]
        at_boundary = advancing[full]
        if blocks.layout.has_windows:
            self._release_behind_windows(np.append(at_boundary, list(chunks)).astype(np.intp))
        needs = {
            row: blocks.rows.num_lacking_blocks(row, int(num_scheduled[row]) + n) for row, n in chunks.items()
        }
        growing = (
            at_boundary if builder.num_drafted is None else self._growing(advancing, builder.num_drafted)
        )
        lacking = blocks.rows.lacking_partitions(growing, needs)
        if lacking and self._state.kv_moves.free_blocks(self._state.in_flight.newest_id):
            lacking = blocks.rows.lacking_partitions(growing, needs)
        if lacking and builder.num_drafted is not None:
            self._drop_drafts(builder)
            growing = at_boundary
            lacking = blocks.rows.lacking_partitions(growing, needs)
        if not lacking:
            if growing.size:
                builder.grown_rows, builder.grown_ids = blocks.rows.grow_by_one(growing)
            return advancing, set()
        needs |= dict.fromkeys(at_boundary.tolist(), blocks.num_groups)
        preempted, stalled = ration_blocks(self._state, builder, needs, chunks)
        out = preempted | stalled
        staying = advancing[~np.isin(advancing, list(out))]
        builder.num_tokens_left += advancing.size - staying.size
        builder.num_tokens_left += sum(chunks.pop(row) for row in out & chunks.keys())
        builder.full_partitions = lacking & self._partitions_at_work((*staying.tolist(), *chunks))
        return staying, preempted

    def _partitions_at_work(self, rows: Iterable[int]) -> set[int]:
        """Return the partitions that have some of `rows` or rows of steps in flight: they make progress."""
        return self._state.blocks.rows.partitions_of({*rows, *self._state.in_flight.rows})

    def _release_behind_windows(self, rows: RowArray) -> None:
        """Release the blocks that are behind the windows of rows that grow.

        After a preemption or a rejected draft a row continues at its newest known token, so its window begins there.
        """
        state = self._state
        positions = np.minimum(state.rows.num_scheduled[rows], state.rows.num_tokens[rows] - 1)
        state.blocks.rows.release_behind_windows(rows, positions, state.in_flight.newest_id)

    def _growing(self, advancing: RowArray, num_drafted: IntArray) -> RowArray:
        """Return the rows that lack blocks for their next and drafted tokens, each as often as it lacks one."""
        blocks = self._state.blocks
        num_tokens = self._state.rows.num_scheduled[advancing] + 1 + num_drafted
        lacking = -(-num_tokens // blocks.block_size) - blocks.tables.lens[advancing]
        return np.repeat(advancing, lacking)

    def _plan_chunks(self, builder: PlanBuilder, chunks: dict[int, int]) -> None:
        for row, num_tokens in chunks.items():
            sequence = self._state.running[row]
            grow(self._state, builder, row, num_tokens)
            self._plan_chunk(builder, sequence, num_tokens)
            if not self._has_prompt_left(sequence):
                self._state.prefilling.discard(sequence)

    def _plan_chunk(self, builder: PlanBuilder, sequence: Sequence, num_tokens: int) -> None:
        """Add the next `num_tokens` of a prompt to the step; the row has blocks for them."""
        row = row_of(sequence)
        start = int(self._state.rows.num_scheduled[row])
        if sequence.prefill_only and start and num_tokens >= self._state.blocks.block_size:
            self._state.lend_prompt(sequence, start, builder.now)
        self._state.rows.schedule(row, num_tokens)
        self._state.blocks.prefixes.publish(row, sequence, start, start + num_tokens)
        for end in sequence.snapshot_ends:
            if start < end <= start + num_tokens:
                self._state.blocks.save_state(row, sequence, end, start + num_tokens - end)
        builder.chunk_rows.append(row)
        builder.chunk_lens.append(num_tokens)
        if not self._has_prompt_left(sequence):
            (builder.first_rows if sequence.pooling is None else builder.pooled_rows).append(row)

    def _has_prompt_left(self, sequence: Sequence) -> bool:
        return int(self._state.rows.num_scheduled[row_of(sequence)]) < len(sequence.token_ids)

    # Sequences that start

    def _start_forks(self, builder: PlanBuilder) -> None:
        """Start forked beams, and the children of parents whose prompt was computed by an earlier step."""
        state = self._state
        for child, parent in state.deltas.take_forks():
            if not self._start_fork(builder, child, parent, len(child.token_ids) - 1):
                child.has_run = True  # it takes its parent's place in the queue: before all that never ran
                state.waiting.push(child)
        for parent in state.parents:
            if not state.rows.decoding[row_of(parent)] or not self._may_run(parent):
                continue
            if not state.blocks.can_fork(row_of(parent), parent.num_prompt_tokens - 1):
                # A window has moved past the end of the prompt, or the state: they compute it from a snapshot.
                state.detach_children(parent)
            for child in tuple(parent.children):
                if not self._start_fork(builder, child, parent, parent.num_prompt_tokens - 1):
                    break
                state.detach(child)

    def _start_fork(self, builder: PlanBuilder, child: Sequence, parent: Sequence, num_tokens: int) -> bool:
        """Start a sequence on the first `num_tokens` of a running one, all but one of its own.

        Returns False if there is no row, no block or no token left, or the parent does not run.
        """
        state = self._state
        if parent.row is None or builder.num_tokens_left < 1 or not state.rows.num_free:
            return False
        if not state.blocks.state_slots.has_room:
            return False
        blocks, partition = state.blocks, state.blocks.rows.partition_of(parent.row)
        lacks_blocks = blocks.num_blocks_to_fork(num_tokens) > blocks.pool.num_free_in(partition)
        if partition in builder.full_partitions or lacks_blocks:
            return False
        if self._lacks_tokens(builder, child, num_tokens) or not self._can_read_from(
            builder, child, num_tokens
        ):
            return False
        row = state.start(child, builder.step_id)
        state.blocks.open_fork(row, parent.row, num_tokens)
        self._plan_first_chunk(builder, child, num_tokens, parent.row)
        return True

    def _admit(self, builder: PlanBuilder, advancing: RowArray) -> set[int]:
        """Start waiting sequences, in order, while rows, blocks and tokens last.

        Returns:
            The rows that were preempted for sequences of higher priority.
        """
        state = self._state
        preempted: set[int] = set()
        self._unpark(builder.now)
        if not state.waiting:
            return preempted
        placement = Placement(state.blocks, builder.full_partitions)
        without_images: set[int] = set()
        while builder.num_tokens_left > 0 and placement.is_open:
            sequence = self._next_waiting(placement.passed | without_images)
            if sequence is None:
                break
            if self._fail_unless_in_time(sequence, builder.now) or self._park_for_adapter(sequence):
                continue
            if self._park_for_read(sequence, builder.now):
                continue
            if self._keeps_rows(builder, advancing):
                break
            places = placement.places_for(sequence)
            has_room = bool(state.rows.num_free and places and places[0].has_room)
            if has_room and state.kv_moves.begin(sequence, builder.now, len(state.running)):
                state.waiting.park(sequence)
                continue
            num_cached_tokens = sequence.num_host_tokens or (places[0].num_cached_tokens if places else 0)
            if self._lacks_tokens(builder, sequence, num_cached_tokens):
                break  # others would take them again in the next step
            if not self._can_read_from(builder, sequence, num_cached_tokens):  # nor is a row preempted for it
                without_images.add(sequence.seq_id)
                if state.media.has_begun_for(sequence):
                    state.waiting.keep_turn(sequence)
                if len(without_images) >= MAX_PASSED:
                    break
                continue
            if has_room:
                state.waiting.remove(sequence)
                self._start(builder, sequence, places[0].prefix)
                continue
            row = self._preempt_for(builder, advancing, sequence, places)
            if row is not None:
                preempted.add(row)
            elif state.rows.num_free:
                placement.pass_over(sequence, places)
                if placement.is_open:
                    state.waiting.keep_turn(sequence)
            else:
                break
        return preempted

    def _can_read_from(self, builder: PlanBuilder, sequence: Sequence, start: int) -> bool:
        """Return whether a sequence may compute its token number `start`: none of an image that is not there yet."""
        media = self._state.media
        return (
            not sequence.media or media.chunk_len(sequence, start, builder.num_tokens_left, builder.now) > 0
        )

    def _keeps_rows(self, builder: PlanBuilder, advancing: RowArray) -> bool:
        """Return whether every row is taken and no sequence is preempted for a waiting one; see `_preempt_for`.

        So it is in most steps while requests wait. Looking for the prefix and for a victim of a sequence that cannot
        start would take a quarter of the scheduler's time.
        """
        if self._state.rows.num_free or self._state.config.scheduler.policy == "priority":
            return False
        at_work = self._partitions_at_work((*advancing.tolist(), *builder.chunk_rows))
        return len(at_work) == self._state.blocks.num_partitions

    def _unpark(self, now: float) -> None:
        """Let sequences whose adapter is ready, or whose blocks were read, wait in order again."""
        for sequence in (*self._state.kv_moves.take_ready(now), *self._state.blocks.stored.unpark(now)):
            self._state.waiting.unpark(sequence)
        if self._state.lora is not None:
            for sequence in self._state.lora.unpark():
                self._state.waiting.unpark(sequence)

    def _park_for_adapter(self, sequence: Sequence) -> bool:
        """Let others pass a sequence whose adapter is not in a slot; return whether it was parked."""
        lora = self._state.lora
        if lora is None or lora.may_start(sequence):
            return False
        self._state.waiting.park(sequence)
        lora.park(sequence)
        return True

    def _park_for_read(self, sequence: Sequence, now: float) -> bool:
        """Let others pass a sequence whose blocks are being read from files; return whether it was parked."""
        stored = self._state.blocks.stored
        if not stored.must_wait(sequence, now):
            return False
        self._state.waiting.park(sequence)
        stored.park(sequence)
        return True

    def _fail_unless_in_time(self, sequence: Sequence, now: float) -> bool:
        """Fail a waiting sequence that cannot be complete before its deadline any more; True if it failed."""
        error = self._forecast.refusal_at_start(sequence, now)
        if error is None:
            return False
        self._state.fail_request((sequence.gateway, sequence.handle), error)
        return True

    def _preempt_for(
        self, builder: PlanBuilder, advancing: RowArray, sequence: Sequence, places: list[Place]
    ) -> int | None:
        """Preempt a running sequence for a waiting one that lacks a row or blocks; return its row.

        Allowed if the policy is ``priority`` and the victim's priority is lower. Also allowed if nothing else makes
        progress: then all running sequences, or all of the partition, are beams, frozen until other beams of their
        search, which wait as well, have been computed.

        Returns None if no preemption is needed or allowed.

        Args:
            places: partitions in which the sequence may start.
        """
        state = self._state
        if state.rows.num_free and any(place.will_have_room for place in places):
            return None  # enough, as soon as the steps in flight are done
        if state.leaving:
            return None  # for a sequence in front of this one, or for it: their rows and blocks come first
        by_priority = state.config.scheduler.policy == "priority"
        at_work = self._partitions_at_work((*advancing.tolist(), *builder.chunk_rows))
        for place in places:
            if place.is_full:
                continue
            partition = None if place.will_have_room else place.partition
            is_stuck = not at_work if partition is None else partition not in at_work
            is_stuck = is_stuck and not state.media.is_encoding  # for rows that go on in a later step
            # First, since nearly always no victim is wanted: looking for one among 200 rows takes 0.2 ms.
            if not (is_stuck or by_priority):
                continue
            victim = find_victim(state, builder, sequence, partition)
            if victim is not None and (is_stuck or victim.rank > sequence.rank):
                row = row_of(victim)
                state.preempt(victim, builder.now)
                return row
        return None

    def _start(self, builder: PlanBuilder, sequence: Sequence, prefix: Prefix) -> None:
        """Give a waiting sequence a row and plan its first chunk."""
        state, blocks = self._state, self._state.blocks
        row = state.start(sequence, builder.step_id)
        sequence.awaited_partition = None
        if sequence.host_blocks:
            num_cached_tokens = blocks.swap_in(row, sequence)
        else:
            num_cached_tokens = blocks.open(row, sequence, prefix)
        state.kv_moves.on_start(sequence)
        blocks.stored.on_start(sequence, num_cached_tokens)
        ends = blocks.snapshot_ends(sequence, prefix, num_cached_tokens)
        sequence.snapshot_ends = state.media.between_images(sequence, ends)
        sequence.num_snapshot_tokens = num_cached_tokens
        if not sequence.has_run:
            state.waiting.charge(sequence, len(sequence.token_ids), 0)
        if sequence.first_run_at is None:
            blocks.state_slots.count_prompt(
                len(sequence.token_ids), prefix.num_shared_blocks * blocks.block_size
            )
            sequence.num_cached_tokens = state.own_prefixes.num_tokens(sequence, num_cached_tokens)
        self._plan_first_chunk(builder, sequence, num_cached_tokens)
        if self._has_prompt_left(sequence):
            state.prefilling.add(sequence)

    def _plan_first_chunk(
        self, builder: PlanBuilder, sequence: Sequence, num_cached_tokens: int, parent_row: int | None = None
    ) -> None:
        """Plan the first chunk of a sequence whose row has the KV of its first tokens.

        Args:
            parent_row: row of the sequence from which it is forked; None for others.
        """
        state, row = self._state, row_of(sequence)
        if sequence.interrupted_at is not None:
            state.stats.count_kept_tokens(min(num_cached_tokens, sequence.num_lost_tokens))
        sequence.on_start(num_cached_tokens, builder.now)
        state.rows.schedule(row, num_cached_tokens)
        num_tokens = self._chunk_len(builder, sequence, len(sequence.token_ids) - num_cached_tokens)
        builder.num_tokens_left -= num_tokens
        state.blocks.rows.grow(row, num_cached_tokens + num_tokens)
        sampling, num_source_tokens = sequence.row_sampling(), 0
        takes_constraint = parent_row is not None and sampling.constraint is not None
        if parent_row is not None:
            builder.source_rows.append(parent_row)
            num_source_tokens = _num_source_tokens(sequence, sampling)
            sampling = replace(sampling, constraint=None)  # whose grammar the ranks know
        builder.new.append(
            NewSequence(
                row=row,
                seq_id=sequence.seq_id,
                token_ids=np.frombuffer(sequence.token_ids[num_source_tokens:].tobytes(), np.int32),
                num_computed_tokens=num_cached_tokens,
                block_ids=state.blocks.tables.ids_of_row(row),
                sampling=sampling,
                lora_slot=self._lora_slot(sequence),
                pooling=sequence.pooling,
                source_row=parent_row,
                num_generated=len(sequence.token_ids) - sequence.num_prompt_tokens,
                state_slot=state.blocks.state_slots.slot_of(row),
                num_source_tokens=num_source_tokens,
                takes_constraint=takes_constraint,
                media=sequence.media,
                media_ids=np.array(sequence.media_ids, np.int32) if sequence.media else NO_INTS,
            )
        )
        self._plan_chunk(builder, sequence, num_tokens)

    def _lora_slot(self, sequence: Sequence) -> int:
        slot = None if self._state.lora is None else self._state.lora.slot_of(sequence)
        return NO_SLOT if slot is None else slot


def _num_source_tokens(fork: Sequence, sampling: RowSampling) -> int:
    """Return the leading tokens of a fork that a rank takes from the row of its parent, see NewSequence."""
    if sampling.logits_processors is not None and sampling.logits_processors.needs_tokens:
        return 0
    most = len(fork.token_ids) - 1
    return most if sampling.constraint is None else min(most, fork.num_prompt_tokens)
