"""SchedulerState: the state that planning and result processing share, and the verbs that move sequences in it.

A sequence is *waiting* (in the queue), *attached* (to a parent whose prompt it shares, until that is computed),
*forked* (a beam that the next plan starts), *running* (it has a row) or *suspended* (a preempted beam whose search
waits for other beams only).

Each part of the state has one owner with its own verbs. `running`, `leaving`, `alive` and `parents` are read-only
views.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from ...proto.block_tables import IntArray, RowArray
from ...proto.config import EngineConfig
from ...proto.errors import DeadlineExpired, QuireError
from ...proto.kv_transfer import KvOffer
from ...proto.lora import LoraReference
from ...proto.stream import FinishReason, Lent, MediaUpload, TokenBatch
from ..kv.block_manager import BlockManager
from ..kv.kv_tiers import KvTiers
from ..kv.own_prefixes import OwnPrefixes
from ..sequences.beam_group import BeamGroup
from ..sequences.repetition import RepetitionDetector
from ..sequences.sequence import Sequence
from ..speculation.draft_switch import MOST_ROWS_ON_CPU, DraftSwitch, min_repeated_len
from ..speculation.jump_forward import JumpForward
from .queue.deadlines import DeadlineQueue
from .queue.kv_moves import make_kv_moves
from .queue.lora_adapters import LoraAdapters
from .queue.media import MediaQueue, not_uploaded
from .queue.pace import Pace
from .queue.policy import CostModel, by_precedence
from .queue.waiting import WaitingQueue
from .replies.outbox import Outbox
from .replies.requests import RequestKey, RequestTable
from .replies.retained_outputs import RetainedOutputs
from .steps.in_flight import InFlightStep, InFlightSteps
from .steps.metrics import SchedulerStats, Throughput
from .steps.plan_deltas import PlanDeltas
from .steps.quarantine import Quarantine
from .steps.row_state import RowState
from .steps.step_times import StepTimes


class PrefillQueue:
    """Running sequences with prompt tokens left to plan, in order of precedence."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=by_precedence)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is in the queue."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)


class SchedulerState:
    """Sequences, rows, blocks, queues and steps in flight of one replica.

    Attributes:
        running: row |-> sequence.
        leaving: those that are preempted once their tokens in flight are known.
        alive: seq_id |-> sequence, for all that have not ended.
        detectors: row |-> detector of repetitions, for running sequences that have one.
        draft_switch: None without speculative decoding.
        min_repeated_len: newest tokens of a sequence that occur before, where it may have drafts; 0 for none.
        jump_forward: of grammars, without speculative decoding; None with it, and where steps have no drafts.
        lora: None without adapters.
        kv_moves: of sequences that come and leave.
        num_prefill_only: sequences that leave with their first token.
    """

    def __init__(self, config: EngineConfig) -> None:
        limits = config.scheduler
        self._running: dict[int, Sequence] = {}
        self._leaving: dict[int, Sequence] = {}
        self._alive: dict[int, Sequence] = {}
        self._of_request: dict[str, list[Sequence]] = {}  # request_id |-> those of `alive`
        self._parents: list[Sequence] = []
        self.detectors: Final[dict[int, RepetitionDetector]] = {}
        self._num_sequences_made = 0
        self.config: Final = config
        self.running: Final[Mapping[int, Sequence]] = MappingProxyType(self._running)
        self.leaving: Final[Mapping[int, Sequence]] = MappingProxyType(self._leaving)
        self.alive: Final[Mapping[int, Sequence]] = MappingProxyType(self._alive)
        self.blocks: Final = BlockManager(config)
        self.rows: Final = RowState(limits.max_num_seqs, config.cache.block_size)
        self.pace: Final = Pace()
        self.waiting: Final = WaitingQueue(
            limits.policy, self.blocks.prefixes.num_cached_tokens, limits.tenant_weights, self.pace
        )
        self.prefilling: Final = PrefillQueue()
        self.requests: Final = RequestTable()
        self.deltas: Final = PlanDeltas()
        self.in_flight: Final = InFlightSteps()
        self.outbox: Final = Outbox()
        self.costs: Final = CostModel(
            config.cache.swap_blocks_per_s,
            config.cache.swap_states_per_s,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        self.kv_moves: Final = make_kv_moves(config, self.blocks, self.costs)
        self.stats: Final = SchedulerStats()
        self.throughput: Final = Throughput()
        self.own_prefixes: Final = OwnPrefixes(config.cache.block_size)
        speculative = config.speculative
        most_rows = MOST_ROWS_ON_CPU if config.parallel.device == "cpu" else None
        self.draft_switch: Final = (
            None
            if speculative is None
            else DraftSwitch(speculative.num_speculative_tokens, most_rows, needs_states=speculative.has_head)
        )
        self.min_repeated_len: Final = 0 if speculative is None else min_repeated_len(speculative)
        self.jump_forward: Final = JumpForward(limits.max_num_seqs) if config.drafts_jump_forward else None
        self.lora: Final = (
            None
            if config.lora is None
            else LoraAdapters(config.lora, config.parallel.num_ranks, limits.max_num_seqs)
        )
        self.step_times: Final = StepTimes()
        self.quarantine: Final = Quarantine()
        self.retained: Final = RetainedOutputs()
        self.media: Final = MediaQueue(config)
        self.num_prefill_only = 0
        self._lent: list[tuple[int, bytes, Lent]] = []  # step that computes the blocks, gateway, message
        self._deadlines = DeadlineQueue(self._alive)

    @property
    def parents(self) -> tuple[Sequence, ...]:
        """Return the running sequences with children attached."""
        return tuple(self._parents)

    @property
    def has_deadlines(self) -> bool:
        return bool(self._deadlines)

    def outputs_of(self, request_id: str) -> list[Sequence]:
        """Return the sequences that are alive of all requests with that id."""
        return self._of_request.get(request_id, [])

    def next_seq_id(self) -> int:
        self._num_sequences_made += 1
        return self._num_sequences_made

    def known_tokens(self, sequence: Sequence) -> array[int]:
        """Return a copy of the prompt and all tokens sampled and applied so far."""
        tokens = sequence.token_ids[:]
        if sequence.row is not None:
            del tokens[int(self.rows.num_flushed[sequence.row]) :]
            tokens.frombytes(self.rows.unflushed(sequence.row).tobytes())
        return tokens

    # Requests

    def add_request(self, sequences: list[Sequence], beams: BeamGroup | None) -> None:
        """Queue a request: the first sequence waits, the others are attached to it.

        Args:
            beams: the beam search that the only sequence begins; None for sampled outputs.
        """
        first, *children = sequences
        for sequence in sequences:
            self._add(sequence)
            self.requests.add((sequence.gateway, sequence.handle), sequence)
        for child in children:
            child.parent = first
        first.children = children
        if beams is not None:
            first.beams = beams
            for handle in range(first.handle, first.handle + beams.num_outputs):
                self.requests.add((first.gateway, handle), beams)
        self.waiting.push(first)

    def end_request(self, key: RequestKey) -> list[RequestKey]:
        """End all sequences that produce a handle's output; return all handles that ended with it."""
        producer = self.requests.remove(key)
        if not isinstance(producer, BeamGroup):
            self.discard(producer)
            return [key]
        first = self.alive[producer.members[0]].handle
        handles = range(first, first + producer.num_outputs)
        others = [(key[0], handle) for handle in handles if handle != key[1]]
        for other in others:
            self.requests.remove(other)
        for seq_id in producer.members:
            self.discard(self.alive[seq_id])
        return [key, *others]

    def fail_adapter(self, reference: LoraReference, error: QuireError) -> None:
        """End the requests that use an adapter, which cannot be loaded."""
        self._fail([each for each in self._alive.values() if each.lora == reference], lambda _: error)

    def fail_request(self, key: RequestKey, error: QuireError) -> None:
        """End a request with an error that is reported to its gateway."""
        gateway, _ = key
        self.outbox.fail(gateway, (handle for _, handle in self.end_request(key)), error)

    def fail_arrival(self, arrival: int, error: Callable[[Sequence], QuireError]) -> None:
        """End all outputs of a request, by its arrival."""
        self._fail([each for each in self._alive.values() if each.arrival == arrival], error)

    def receive_media(self, message: MediaUpload, now: float) -> None:
        """Take a piece of an image; end the sequences that need it if it cannot be read."""
        failed = self.media.receive(message, now)
        if failed is not None:
            sequences, error = failed
            self._fail(sequences, lambda _: error)

    def fail_expired(self, now: float) -> None:
        """End the sequences whose deadline has passed, and those whose images did not come in time."""
        self._fail(self._deadlines.expire(now), _expired)
        self._fail(self.media.expire(now), not_uploaded)

    def _fail(self, sequences: Iterable[Sequence], error: Callable[[Sequence], QuireError]) -> None:
        for sequence in sequences:
            if sequence.seq_id in self._alive:  # it did not end with another one of its request just now
                self.fail_request((sequence.gateway, sequence.handle), error(sequence))

    def abandon_steps(self) -> None:
        """Forget the steps in flight: no results will follow."""
        while self.in_flight:
            self.blocks.free_fenced(self.in_flight.pop().step_id)

    # Sequences

    def start(self, sequence: Sequence, step_id: int) -> int:
        """Give a sequence a row, with its tokens but without blocks; return the row."""
        row = self.rows.allocate(sequence, self.requests.gateways[sequence.gateway], step_id)
        sequence.row = row
        self._running[row] = sequence
        if self.lora is not None:
            self.lora.on_start(sequence)
        if sequence.repetition is not None:
            self.detectors[row] = sequence.repetition
        if self.jump_forward is not None and sequence.has_grammar and sequence.may_draft:
            self.jump_forward.add(row)
        if sequence.children:
            self._parents.append(sequence)
        return row

    def detach(self, child: Sequence) -> None:
        """Separate a child from its running parent: it starts, or has ended."""
        parent = child.parent
        assert parent is not None, f"sequence {child.seq_id} has no parent"
        child.parent = None
        parent.children.remove(child)
        if not parent.children and parent in self._parents:
            self._parents.remove(parent)

    def detach_children(self, parent: Sequence) -> None:
        """Let children wait on their own: their parent has lost its row or blocks, or ended."""
        if not parent.children:
            return
        children, parent.children = parent.children, []
        for child in children:
            child.parent = None
            self.waiting.push(child)
        if parent in self._parents:
            self._parents.remove(parent)

    def fork(self, parent: Sequence, token_id: int) -> Sequence:
        """Make a beam that has the tokens of `parent` so far, and then `token_id`; the next plan starts it."""
        tokens = self.known_tokens(parent)
        tokens.append(token_id)
        child = replace(
            parent,
            seq_id=self.next_seq_id(),
            token_ids=tokens,
            block_digests=list(parent.block_digests),
            row=None,
            host_blocks=[],
            host_state=0,
            num_lost_tokens=0,
            is_suspended=False,
            snapshot_ends=(),
        )
        self._add(child)
        self.deltas.fork(child, parent)
        return child

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take a running sequence's row and blocks; it keeps its place in the order of arrival and resumes later.

        Its KV goes to host memory or is recomputed, whichever costs less. A token in flight is dropped and will be
        sampled again, the same. But a state in place is that of tokens in flight too: one that goes to host memory
        keeps its row until these are known, and computes nothing meanwhile (`preempt_leaving`).
        """
        row = row_of(sequence)
        is_ahead = self.blocks.state_slots.is_on and bool(self._is_ahead(row))
        swaps = self._prefers_swap(sequence)
        if swaps and is_ahead and sequence.beams is None:
            self.rows.freeze(np.array([row], np.intp))
            self._leaving[row] = sequence
            return
        num_tokens = self._collect_tokens(sequence)
        if swaps and not is_ahead:
            self.blocks.swap_out(row, sequence, num_tokens)
        sequence.preempted_at = now
        self._requeue(sequence)
        self.stats.count_preemption()

    def preempt_leaving(self, now: float) -> None:
        """Preempt the sequences whose tokens in flight are known now."""
        for row, sequence in list(self._leaving.items()):
            if not self._is_ahead(row):
                self.preempt(sequence, now)

    def _is_ahead(self, row: int) -> bool:
        """Return whether a row's newest computed token is in flight or its successor is not chosen."""
        return int(self.rows.num_scheduled[row]) >= int(self.rows.num_tokens[row])

    def _prefers_swap(self, sequence: Sequence) -> bool:
        """Return whether the KV of a running sequence, and its state, should move to host memory."""
        # A prompt that is being scored is recomputed: scores in flight are dropped with the row. So is a prompt that
        # is pooled as a whole: the ranks have added up hidden states for the row.
        row, blocks = row_of(sequence), self.blocks
        num_tokens = min(int(self.rows.num_scheduled[row]), int(self.rows.num_tokens[row]) - 1)
        if num_tokens <= 0 or sequence.is_scoring or sequence.pools_all_tokens or not blocks.can_swap_out():
            return False
        has_state, num_lost = blocks.state_slots.is_on, num_tokens
        if has_state:
            num_lost -= blocks.prefixes.num_cached_tokens(sequence)  # it would go on from a snapshot
        num_blocks = blocks.tiers.num_blocks_to_swap(num_tokens)
        return self.costs.swap_is_cheaper(num_blocks, num_lost, has_state=has_state)

    def hand_off(self, key: RequestKey, now: float) -> None:
        """End a handle's sequences, and report to its gateway how many tokens they had, and where their KV is."""
        producer = self.requests.get(key)
        if producer is None:  # it moved with another handle of its beam search
            return
        offer = None
        if isinstance(producer, BeamGroup):
            first = self.alive[producer.members[0]]
            num_tokens = first.num_prompt_tokens
        else:
            first, tokens = producer, self.known_tokens(producer)
            num_tokens = len(tokens)
            offer = self._offer(first, tokens, now)
        self._end_as_moved(key, first, num_tokens, offer, now)

    def hand_off_prefilled(self, sequence: Sequence, now: float) -> None:
        """Let a sequence leave that has its first token, if its blocks can be lent; it stays here otherwise."""
        tokens = self.known_tokens(sequence)
        offer = self._offer(sequence, tokens, now)
        if offer is None:
            sequence.prefill_only = False
            self.num_prefill_only -= 1
        else:
            self.kv_moves.num_split_prompts += 1
            self._end_as_moved((sequence.gateway, sequence.handle), sequence, len(tokens), offer, now)

    def lend_prompt(self, sequence: Sequence, num_computed: int, now: float) -> None:
        """Lend the first tokens of a prompt, so that they travel while a step computes the next ones.

        The plan of that step lends them. The gateway hears of it when the step before has computed them.
        """
        offer = self.kv_moves.offer_part(sequence, row_of(sequence), num_computed, now)
        if offer is None:
            return
        computes = self.in_flight.newest_id
        self._lent.append(
            (0 if computes is None else computes, sequence.gateway, Lent(sequence.handle, offer))
        )
        if computes is None:
            self.send_lent(0)

    def send_lent(self, step_id: int) -> None:
        """Tell gateways what was lent of prompts, as far as steps up to this one have computed it."""
        while self._lent and self._lent[0][0] <= step_id:
            _, gateway, lent = self._lent.pop(0)
            self.outbox.add(gateway, TokenBatch(0, lent=(lent,)))

    def _offer(self, sequence: Sequence, tokens: array[int], now: float) -> KvOffer | None:
        if sequence.row is None or sequence.sampling.is_ranked:
            return None
        num_computed = int(self.rows.num_scheduled[sequence.row])
        return self.kv_moves.offer(sequence, sequence.row, tokens, num_computed, now)

    def _end_as_moved(
        self, key: RequestKey, first: Sequence, num_tokens: int, offer: KvOffer | None, now: float
    ) -> None:
        moved = [
            first.finish(FinishReason.MOVED, num_tokens, now, handle=handle, kv=offer)
            for _, handle in self.end_request(key)
        ]
        gateway, _ = key
        self.outbox.finish(gateway, moved)

    def retract_drafts(self, rows: RowArray, counts: IntArray) -> None:
        """Take back rejected drafted tokens of distinct rows, and release the blocks that were for these only."""
        self.rows.retract(rows, counts)
        tables, num_tokens = self.blocks.tables, self.rows.num_scheduled[rows]
        needed = -(-num_tokens // self.blocks.block_size)
        surplus = tables.lens[rows] > needed
        if np.count_nonzero(surplus):
            trimmed, lens = rows[surplus], needed[surplus]
            self.blocks.rows.trim(trimmed, lens, self.in_flight.newest_id)
            self.deltas.trim_rows(trimmed, lens)

    def interrupt_all(self, now: float) -> None:
        """Take the rows and blocks of all running sequences: the worker group failed.

        The sequences keep their places in the order of arrival and resume later. Tokens in flight are dropped and
        will be sampled again, the same. KV that the steps in flight may have left half written is void; see
        `keep_tiers` for the rest.
        """
        for sequence in self._running.values():
            sequence.interrupted_at = now
        void, void_states = self._requeue_running()
        self._drop_swapped(lambda own: own.host_state in void_states or not void.isdisjoint(own.host_blocks))
        if self.lora is not None:
            self.lora.reset()
        self.media.reset()

    def requeue_all(self, now: float) -> None:
        """Take the rows and blocks of all running sequences, which resume later: the KV becomes void."""
        for sequence in self._running.values():
            sequence.preempted_at = now
        self._requeue_running()
        self.keep_tiers(KvTiers.NONE)
        self.media.reset()

    def keep_tiers(self, tiers: KvTiers) -> None:
        """Make the KV void, except in these memories."""
        if KvTiers.HOST not in tiers:
            self._drop_swapped(lambda sequence: True)
        self.blocks.keep_tiers(tiers)

    def _drop_swapped(self, is_void: Callable[[Sequence], bool]) -> None:
        for sequence in self._alive.values():
            if sequence.host_blocks and is_void(sequence):
                self.blocks.drop_swapped(sequence)

    def _requeue_running(self) -> tuple[set[int], set[int]]:
        """Take all rows and the steps in flight; return the host blocks and states that may be half written."""
        for sequence in list(self._running.values()):
            self._collect_tokens(sequence)
            self._requeue(sequence)
        self.abandon_steps()
        self.deltas.forget_rows()
        self.kv_moves.forget()
        self._lent.clear()
        return self.blocks.forget_unconfirmed()

    def requests_in(self, step: InFlightStep) -> set[int]:
        """Return the arrivals of the requests in a step in flight, without those that have lost their rows since.

        Those whose images are encoded in it may have no row yet.
        """
        rows = (row for row in step.all_rows if self.rows.entered_at_step[row] <= step.step_id)
        users = self.media.users_of(step.encodes) if step.encodes else ()
        return {self._running[row].arrival for row in rows} | {sequence.arrival for sequence in users}

    def resume(self, sequence: Sequence, token_id: int) -> None:
        """Let a suspended beam wait for a row; its search has chosen its next token."""
        sequence.token_ids.append(token_id)
        sequence.is_suspended = False
        self.waiting.push(sequence)

    def discard(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is, and free its row and blocks."""
        self.own_prefixes.add(sequence)
        self.kv_moves.discard(sequence)
        self.blocks.stored.forget(sequence)
        self.media.discard(sequence)
        self.num_prefill_only -= sequence.prefill_only
        del self._alive[sequence.seq_id]
        others = self._of_request[sequence.request_id]
        others.remove(sequence)
        if not others:
            del self._of_request[sequence.request_id]
        if sequence.row is not None:
            self._release_row(sequence)
            self._discard_lora(sequence)
            return
        self._discard_lora(sequence)
        self.blocks.drop_swapped(sequence)
        self.detach_children(sequence)
        if sequence.is_suspended:
            return
        if sequence.parent is not None:
            self.detach(sequence)
        elif not self.deltas.cancel_fork(sequence):
            self.waiting.remove(sequence)

    def check_integrity(self) -> None:
        """Recount blocks, rows and queues. Raises AssertionError at the first inconsistency."""
        if self.lora is not None:
            self.lora.check_integrity(self.alive.values())
        assert sum(map(len, self._of_request.values())) == len(self.alive), "requests have other sequences"
        self.media.check_integrity(self.alive.values())
        host_blocks = [b for sequence in self.alive.values() for b in sequence.host_blocks]
        host_states = [own.host_state for own in self.alive.values() if own.host_state]
        self.blocks.check_integrity(host_blocks, host_states, list(self.running))
        for row, sequence in self._leaving.items():
            assert sequence.row == row, f"sequence {sequence.seq_id} is to leave row {row}"
            assert self.rows.frozen[row], f"row {row} is to be left and computes on"
        self.blocks.stored.check_integrity(list(self.alive))
        rows, tables = self.rows, self.blocks.tables
        rows.check_integrity()
        assert len(self.running) + rows.num_free == rows.num_rows, "rows are lost or counted twice"
        attached = sum(len(sequence.children) for sequence in self.alive.values())
        suspended = sum(sequence.is_suspended for sequence in self.alive.values())
        places = len(self.running) + len(self.waiting) + attached + suspended + self.deltas.num_forks
        assert len(self.alive) == places, f"{len(self.alive)} sequences are in {places} places"
        for row, sequence in self.running.items():
            assert sequence.row == row, f"sequence {sequence.seq_id} in row {row} has row {sequence.row}"
            assert sequence.seq_id in self.alive, f"sequence {sequence.seq_id} runs after its end"
            held, planned = int(tables.lens[row]), int(rows.num_scheduled[row])
            assert held == self.blocks.rows.num_blocks_for(planned), (
                f"row {row} has {held} blocks for {planned} tokens"
            )
            assert planned < int(rows.num_tokens[row]) + max(1, self.in_flight.max_row_tokens), (
                f"row {row} runs ahead"
            )

    # Details

    def _add(self, sequence: Sequence) -> None:
        self._alive[sequence.seq_id] = sequence
        self.num_prefill_only += sequence.prefill_only
        self._of_request.setdefault(sequence.request_id, []).append(sequence)
        if self.lora is not None:
            self.lora.add(sequence)
        self.media.add(sequence)
        self._deadlines.add(sequence)

    def _collect_tokens(self, sequence: Sequence) -> int:
        """Move all known tokens of a running sequence into it; return the number of computed ones."""
        sequence.token_ids = self.known_tokens(sequence)
        num_scheduled = int(self.rows.num_scheduled[row_of(sequence)])
        sequence.num_lost_tokens = min(num_scheduled, len(sequence.token_ids) - 1)
        return sequence.num_lost_tokens

    def _requeue(self, sequence: Sequence) -> None:
        """Take a running sequence's row, and let it wait for another one."""
        self._release_row(sequence)
        if sequence.beams is None or sequence.beams.is_waiting_for(sequence.seq_id):
            self.waiting.push(sequence)
        else:
            sequence.is_suspended = True

    def _release_row(self, sequence: Sequence) -> None:
        row = row_of(sequence)
        self._leaving.pop(row, None)
        self.blocks.close(row, self.in_flight.newest_id)
        self.rows.free(row)
        self.deltas.release_row(row)
        del self._running[row]
        if self.lora is not None:
            self.lora.on_release(sequence)
        self.detectors.pop(row, None)
        if self.jump_forward is not None:
            self.jump_forward.discard(row)
        sequence.row = None
        self.prefilling.discard(sequence)
        self.detach_children(sequence)

    def _discard_lora(self, sequence: Sequence) -> None:
        if self.lora is not None:
            self.lora.discard(sequence)


def row_of(sequence: Sequence) -> int:
    assert sequence.row is not None, f"sequence {sequence.seq_id} is not running"
    return sequence.row


def _expired(sequence: Sequence) -> DeadlineExpired:
    return DeadlineExpired(f"request {sequence.request_id}: its deadline passed before it was complete")
