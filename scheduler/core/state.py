"""SchedulerState: what planning and taking-in share, and the verbs that move a sequence between its places.

A sequence is *waiting* (in the queue), *attached* (to a leader whose prompt it shares, until that is computed),
*running* (it has a row) or *parked* (a beam that lost its row when only others of its search were left to compute).
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from dataclasses import dataclass

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ...proto.stream import Finish, FinishReason, TokenBatch
from ..kv.block_manager import BlockManager
from ..sequences.beam_group import BeamGroup
from ..sequences.sequence import Sequence
from .metrics import SchedulerStats, Throughput
from .policy import CostModel
from .row_state import RowState
from .waiting import WaitingQueue

RequestKey = tuple[bytes, int]  # gateway and handle


@dataclass(slots=True)
class InFlight:
    """A step whose result is awaited.

    Attributes:
        rows: those that sample, ascending.
        first_rows: of them, those that sample the first token after a prefill.
        num_tokens: computed in the step, over all rows.
        planned_at: on the scheduler's clock.
    """

    step_id: int
    rows: IntArray
    first_rows: list[int]
    num_tokens: int
    planned_at: float

    @property
    def num_prompt_tokens(self) -> int:
        """All but one for each row that decodes."""
        return self.num_tokens - (self.rows.size - len(self.first_rows))


class SchedulerState:
    """Sequences, rows, blocks, the queue and the steps in flight of one replica.

    Attributes:
        running: row |-> sequence.
        prefilling: running sequences with prompt tokens left to plan, by arrival.
        leaders: running sequences with siblings attached.
        forks: (child, parent) of beam searches, to be started by the next plan.
        requests: (gateway, handle) |-> who answers it.
        alive: every sequence that has not ended.
        released: rows emptied since the last plan.
        chosen: (row, token) that beam searches chose since the last plan.
        news: what is to be told beside the results of steps.
    """

    def __init__(self, config: EngineConfig) -> None:
        limits = config.scheduler
        self.config = config
        self.blocks = BlockManager(config)
        self.rows = RowState(limits.max_num_seqs, config.cache.block_size)
        self.waiting = WaitingQueue(limits.policy, self.blocks.num_cached_tokens, limits.tenant_weights)
        self.costs = CostModel(config.cache.swap_blocks_per_s)
        self.running: dict[int, Sequence] = {}
        self.prefilling: list[Sequence] = []
        self.leaders: list[Sequence] = []
        self.forks: list[tuple[Sequence, Sequence]] = []
        self.requests: dict[RequestKey, Sequence | BeamGroup] = {}
        self.alive: dict[int, Sequence] = {}
        self.gateways: dict[bytes, int] = {}  # gateway |-> its number in rows.gateway
        self.in_flight: deque[InFlight] = deque()
        self.released: list[int] = []
        self.chosen: list[tuple[int, int]] = []
        self.news: list[tuple[bytes, TokenBatch]] = []
        self.stats = SchedulerStats()
        self.throughput = Throughput()
        self.num_sequences_made = 0
        self._num_gateways_seen = 0
        self._deadlines: list[tuple[float, int]] = []
        self._advancing: IntArray | None = None

    @property
    def fence_step(self) -> int | None:
        """The newest step in flight, which may still touch what is released now."""
        return self.in_flight[-1].step_id if self.in_flight else None

    def next_seq_id(self) -> int:
        self.num_sequences_made += 1
        return self.num_sequences_made

    def advancing_rows(self) -> IntArray:
        """Decoding rows that have a token to compute, ascending: not frozen, and not with their last in flight."""
        if self._advancing is None:
            rows = self.rows
            ready = rows.decoding & ~rows.frozen & (rows.num_scheduled < rows.limit - 1)
            self._advancing = np.flatnonzero(ready).astype(np.int32)
        return self._advancing

    def invalidate_advancing_rows(self) -> None:
        """The set of advancing rows has changed."""
        self._advancing = None

    def known_tokens(self, sequence: Sequence) -> array[int]:
        """Prompt and all tokens sampled and taken in so far; a copy."""
        tokens = sequence.token_ids[:]
        if sequence.row is not None:
            del tokens[int(self.rows.num_flushed[sequence.row]) :]
            tokens.frombytes(self.rows.unflushed(sequence.row).tobytes())
        return tokens

    # Moving between places

    def add(self, sequence: Sequence) -> None:
        """A new sequence; where it waits is for the caller to say."""
        self.alive[sequence.seq_id] = sequence
        if sequence.gateway not in self.gateways:
            self.gateways[sequence.gateway] = self._num_gateways_seen
            self._num_gateways_seen += 1
        if sequence.deadline is not None:
            self._forget_met_deadlines()
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.seq_id))

    def enter(self, sequence: Sequence, row: int, num_cached_tokens: int, now: float) -> None:
        """A sequence has got a row, filled with its tokens; the first `num_cached_tokens` are computed."""
        rows = self.rows
        sequence.row = row
        self.running[row] = sequence
        rows.num_scheduled[row] = num_cached_tokens
        rows.handle[row] = sequence.handle
        rows.gateway[row] = self.gateways[sequence.gateway]
        rows.is_beam[row] = sequence.beams is not None
        rows.stops_at_eos[row] = bool(sequence.eos_token_ids)
        rows.has_own_stops[row] = bool(sequence.sampling.stop_token_ids)
        sequence.entered(num_cached_tokens, now)
        if sequence.siblings:
            self.leaders.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Takes a running sequence's row and blocks."""
        row = row_of(sequence)
        self.blocks.close(row, self.fence_step)
        self.rows.free(row)
        self.released.append(row)
        self.chosen = [(chosen, token) for chosen, token in self.chosen if chosen != row]
        self.invalidate_advancing_rows()
        del self.running[row]
        sequence.row = None
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        self.detach(sequence)

    def detach(self, leader: Sequence) -> None:
        """Siblings that cannot be forked from a running leader any more wait like any other sequence."""
        for sibling in leader.siblings:
            sibling.leader = None
            self.waiting.push(sibling)
        leader.siblings = []
        if leader in self.leaders:
            self.leaders.remove(leader)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Takes a running sequence's row and blocks; it keeps its place and comes back.

        Its KV goes to host memory, or is computed again, whichever costs less. A token of it that is in flight is
        dropped and will be sampled again, the same.
        """
        row = row_of(sequence)
        sequence.token_ids = self.known_tokens(sequence)
        num_tokens = min(int(self.rows.num_scheduled[row]), len(sequence.token_ids) - 1)
        sequence.num_lost_tokens = num_tokens
        # A prompt that is being scored is computed again: scores that are in flight are dropped with the row.
        may_swap = num_tokens > 0 and not sequence.is_scoring
        if may_swap and self.costs.swap_is_cheaper(self.blocks.num_blocks_for(num_tokens), num_tokens):
            sequence.host_blocks = self.blocks.swap_out(row, num_tokens) or []
            sequence.num_host_tokens = num_tokens if sequence.host_blocks else 0
        sequence.preempted_at = now
        self.leave(sequence)
        if sequence.beams is None or sequence.beams.is_waiting_for(sequence.seq_id):
            self.waiting.push(sequence)
        else:
            sequence.is_parked = True
        self.stats.num_preemptions += 1

    def discard(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is, and frees all it has."""
        del self.alive[sequence.seq_id]
        if sequence.row is not None:
            self.leave(sequence)
            return
        self.blocks.drop_host_blocks(sequence.host_blocks)
        sequence.host_blocks = []
        self.detach(sequence)
        pending = [pair for pair in self.forks if pair[0] is not sequence]
        if sequence.is_parked:
            return
        if sequence.leader is not None:
            sequence.leader.siblings.remove(sequence)
        elif len(pending) < len(self.forks):
            self.forks = pending
        else:
            self.waiting.remove(sequence)

    def end_request(self, key: RequestKey) -> list[RequestKey]:
        """Ends all sequences that answer a handle; returns every handle that ended with it."""
        owner = self.requests.pop(key)
        if not isinstance(owner, BeamGroup):
            self.discard(owner)
            return [key]
        first = self.alive[owner.members[0]].handle
        handles = range(first, first + owner.num_answers)
        others = [(key[0], handle) for handle in handles if handle != key[1]]
        for other in others:
            del self.requests[other]
        for seq_id in owner.members:
            self.discard(self.alive[seq_id])
        return [key, *others]

    # Deadlines

    def _forget_met_deadlines(self) -> None:
        """Most requests end before their deadline: the heap must not keep all of them until then."""
        if len(self._deadlines) > 2 * len(self.alive) + 1024:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.alive]
            heapq.heapify(self._deadlines)

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed, each told once."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, seq_id = heapq.heappop(self._deadlines)
            if seq_id in self.alive:
                late.append(self.alive[seq_id])
        return late

    def fail_request(self, key: RequestKey, grpc_status: str, error: str) -> None:
        """Ends what answers a handle, with an error that is told."""
        ends = tuple(
            Finish(handle, FinishReason.ERROR, grpc_status=grpc_status, error=error)
            for _, handle in self.end_request(key)
        )
        self.news.append((key[0], TokenBatch(0, finished=ends)))

    def check_integrity(self) -> None:
        """Recounts blocks, rows and queues; raises AssertionError on the first thing that is out of place."""
        self.blocks.check_integrity([b for sequence in self.alive.values() for b in sequence.host_blocks])
        rows, tables = self.rows, self.blocks.tables
        assert len(self.running) + rows.num_free == rows.num_rows, "rows are lost or doubled"
        aside = sum(len(s.siblings) + s.is_parked for s in self.alive.values()) + len(self.forks)
        places = len(self.running) + len(self.waiting) + aside
        assert len(self.alive) == places, f"{len(self.alive)} sequences are in {places} places"
        for row, sequence in self.running.items():
            assert sequence.row == row, (
                f"sequence {sequence.seq_id} believes in row {sequence.row}, has {row}"
            )
            assert sequence.seq_id in self.alive, f"sequence {sequence.seq_id} runs after its end"
            held, planned = int(tables.lens[row]), int(rows.num_scheduled[row])
            assert held == self.blocks.num_blocks_for(planned), (
                f"row {row} has {held} blocks for {planned} tokens"
            )
            assert planned <= int(rows.num_tokens[row]) + len(self.in_flight), f"row {row} runs ahead"


def row_of(sequence: Sequence) -> int:
    assert sequence.row is not None, f"sequence {sequence.seq_id} is not running"
    return sequence.row
