"""Scheduler: decides each step, and takes in what came of it.

Pure Python and numpy: no torch, no Ray, no clock (time is passed in). `schedule` may be called again before the
result of the step before is applied; sampled tokens that are not known yet are placeholders that only the ranks
know. A stop that is found one step late wastes that step's token, which is dropped here and never told.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ..proto.block_tables import IntArray
from ..proto.config import EngineConfig
from ..proto.errors import InvalidRequest, Overloaded, ProtocolError, QuireError
from ..proto.step import NO_INTS, Logprobs, NewSequence, StepPlan, StepResult
from ..proto.stream import Finish, FinishReason, Submit, TokenBatch
from .block_manager import BlockManager
from .metrics import SchedulerStats
from .policy import WaitingQueue, choose_victim
from .rows import Rows
from .sequence import Sequence

# While others run, admission leaves this share of the pool to their growth: an admission that forces a preemption
# a few steps later costs a prefill.
WATERMARK = 0.01


@dataclass(slots=True)
class _InFlight:
    """A step whose result is awaited.

    Attributes:
        rows: those that sample, ascending.
        first_rows: of them, those that sample the first token after a prefill.
    """

    step_id: int
    rows: IntArray
    first_rows: list[int]


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    step_id: int
    now: float
    budget: int
    new: list[NewSequence] = field(default_factory=list)
    appended_rows: list[int] = field(default_factory=list)
    appended_ids: list[int] = field(default_factory=list)
    chunk_rows: list[int] = field(default_factory=list)
    chunk_lens: list[int] = field(default_factory=list)
    first_rows: list[int] = field(default_factory=list)


class Scheduler:
    """The control plane of one replica.

    Args:
        config: with the number of blocks resolved.
        epoch: which life of the worker group the plans are for.
    """

    def __init__(self, config: EngineConfig, epoch: int = 1) -> None:
        self.config = config
        self._epoch = epoch
        self._blocks = BlockManager(config)
        self._rows = Rows(config.scheduler.max_num_seqs, config.cache.block_size)
        self._waiting = WaitingQueue()
        self._running: dict[int, Sequence] = {}  # row |-> sequence
        self._prefilling: list[Sequence] = []  # running, with prompt tokens left; by arrival
        self._by_handle: dict[tuple[bytes, int], Sequence] = {}
        self._gateways: dict[bytes, int] = {}  # gateway |-> its number in rows.gateway
        self._in_flight: deque[_InFlight] = deque()
        self._released: list[int] = []  # rows emptied since the last plan
        self._eos = np.asarray(config.model.eos_token_ids, np.int32)
        self._num_arrived = 0
        self._advancing: IntArray | None = (
            None  # decoding rows with a token left to compute; None: look again
        )
        self.stats = SchedulerStats()

    @property
    def blocks(self) -> BlockManager:
        return self._blocks

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose result was not applied."""
        return len(self._in_flight)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_used_tokens(self) -> int:
        """Tokens whose KV running sequences hold."""
        return int(self._rows.num_scheduled.sum())

    @property
    def has_work(self) -> bool:
        return bool(self._by_handle or self._in_flight)

    def add(self, gateway: bytes, submit: Submit, now: float) -> Finish | None:
        """Queues a sequence; returns a Finish when it is refused."""
        problem = self._refusal(gateway, submit)
        if problem is not None:
            return Finish(
                submit.handle, FinishReason.ERROR, grpc_status=problem.grpc_status, error=str(problem)
            )
        num_prompt_tokens = len(submit.prompt_token_ids)
        limit = self.config.max_servable_tokens
        if submit.sampling.max_tokens is not None:
            limit = min(limit, num_prompt_tokens + submit.sampling.max_tokens)
        self._num_arrived += 1
        self._gateways.setdefault(gateway, len(self._gateways))
        eos = self.config.model.eos_token_ids
        sequence = Sequence.of(submit, self._num_arrived, gateway, limit, eos, now)
        self._by_handle[gateway, submit.handle] = sequence
        self._waiting.push(sequence)
        return None

    def abort(self, gateway: bytes, handle: int) -> bool:
        """Ends a sequence without a word; False where there is none such."""
        sequence = self._by_handle.pop((gateway, handle), None)
        if sequence is None:
            return False
        if sequence.row is None:
            self._waiting.abort(sequence)
        else:
            self._release_row(sequence)
        return True

    def stop(self, gateway: bytes, handle: int, now: float) -> Finish | None:
        """Ends a sequence whose gateway found a stop string; None where it has ended already."""
        sequence = self._by_handle.get((gateway, handle))
        if sequence is None:
            return None
        row = sequence.row
        num_tokens = len(sequence.token_ids) if row is None else int(self._rows.num_tokens[row])
        self.abort(gateway, handle)
        self.stats.num_finished += 1
        return sequence.finish(FinishReason.STOP, num_tokens, now)

    def drop_gateway(self, gateway: bytes) -> None:
        """Aborts all sequences of a gateway that is gone."""
        for owner, handle in [key for key in self._by_handle if key[0] == gateway]:
            self.abort(owner, handle)

    def fail_all(self, error: QuireError, now: float) -> list[tuple[bytes, TokenBatch]]:
        """Ends every sequence with an error, as (gateway, news)."""
        finished: dict[bytes, list[Finish]] = {gateway: [] for gateway in self._gateways}
        for (gateway, handle), sequence in list(self._by_handle.items()):
            finish = Finish(handle, FinishReason.ERROR, grpc_status=error.grpc_status, error=str(error))
            finished[gateway].append(finish)
            self.abort(gateway, sequence.handle)
        while self._in_flight:
            self._blocks.lift_fences(self._in_flight.popleft().step_id)
        return [(gateway, TokenBatch(0, finished=tuple(ends))) for gateway, ends in finished.items() if ends]

    # Planning

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing that could be computed now."""
        advancing = self._advancing_rows()
        draft = _Draft(self.stats.num_steps + 1, now, self.config.scheduler.max_num_batched_tokens)
        draft.budget -= advancing.size
        chunks = self._share_budget(draft)
        advancing = self._find_blocks(draft, advancing, chunks)
        self._plan_chunks(draft, chunks)
        self._admit(draft)
        if advancing.size == 0 and not draft.chunk_rows:
            return None
        return self._commit(draft, advancing)

    def _advancing_rows(self) -> IntArray:
        """Decoding rows that have a token to compute, ascending: all but those whose last one is in flight."""
        if self._advancing is None:
            rows = self._rows
            self._advancing = np.flatnonzero(rows.decoding & (rows.num_scheduled < rows.limit - 1)).astype(
                np.int32
            )
        return self._advancing

    def _share_budget(self, draft: _Draft) -> dict[int, int]:
        """Continues prefills, oldest first: row |-> tokens in this step."""
        chunks: dict[int, int] = {}
        for sequence in self._prefilling:
            if draft.budget <= 0:
                break
            row = _row_of(sequence)
            chunks[row] = min(draft.budget, len(sequence.token_ids) - int(self._rows.num_scheduled[row]))
            draft.budget -= chunks[row]
        return chunks

    def _find_blocks(self, draft: _Draft, advancing: IntArray, chunks: dict[int, int]) -> IntArray:
        """Gives blocks to all that need them in this step; takes those that get none out of the step.

        Returns:
            The rows of `advancing` that stay. `chunks` is changed in place.
        """
        tables, num_scheduled = self._blocks.tables, self._rows.num_scheduled
        at_boundary = advancing[tables.lens[advancing] * self._blocks.block_size == num_scheduled[advancing]]
        needs = {
            row: self._blocks.num_lacking_blocks(row, int(num_scheduled[row]) + n)
            for row, n in chunks.items()
        }
        if at_boundary.size + sum(needs.values()) <= self._blocks.num_free_blocks:
            new_ids = self._blocks.grow_by_one(at_boundary)
            draft.appended_rows += at_boundary.tolist()
            draft.appended_ids += new_ids.tolist()
            return advancing
        needs |= dict.fromkeys(at_boundary.tolist(), 1)
        out = self._ration(draft, needs, chunks)
        for row in out & chunks.keys():
            del chunks[row]
        draft.budget = 0  # nobody is admitted into a full pool
        return advancing[~np.isin(advancing, list(out))]

    def _ration(self, draft: _Draft, needs: dict[int, int], chunks: dict[int, int]) -> set[int]:
        """Too few blocks for all: the oldest get theirs first, at the cost of the latest arrivals.

        The victims' blocks may still be fenced by steps in flight. Then their beneficiary, and all after it, sit
        this step out.

        Returns:
            Rows that do not take part in this step: preempted, or without blocks.
        """
        out: set[int] = set()
        stalled = False
        for sequence in sorted((self._running[row] for row in needs), key=lambda sequence: sequence.seq_id):
            row = sequence.row
            if row is None:  # preempted by an older one just now
                continue
            while self._blocks.num_unheld_blocks < needs[row]:
                victim = choose_victim(self._running.values(), sequence)
                if victim is None:
                    break
                out.add(_row_of(victim))
                self._preempt(victim, draft.now)
            stalled = stalled or self._blocks.num_free_blocks < needs[row]
            if stalled:
                out.add(row)
            else:
                self._grow(draft, row, chunks.get(row, 1))
        return out

    def _grow(self, draft: _Draft, row: int, num_tokens: int) -> None:
        """Makes room in a row's table for its next `num_tokens`."""
        ids = self._blocks.grow(row, int(self._rows.num_scheduled[row]) + num_tokens)
        draft.appended_rows += [row] * len(ids)
        draft.appended_ids += ids

    def _plan_chunks(self, draft: _Draft, chunks: dict[int, int]) -> None:
        for row, num_tokens in chunks.items():
            self._grow(draft, row, num_tokens)
            self._plan_chunk(draft, self._running[row], num_tokens)
        self._prefilling = [sequence for sequence in self._prefilling if self._has_prompt_left(sequence)]

    def _plan_chunk(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        """The next `num_tokens` of a prompt, whose blocks the row has, are part of the step."""
        row = _row_of(sequence)
        start = int(self._rows.num_scheduled[row])
        self._rows.num_scheduled[row] = start + num_tokens
        self._blocks.publish(row, sequence, start, start + num_tokens)
        draft.chunk_rows.append(row)
        draft.chunk_lens.append(num_tokens)
        if not self._has_prompt_left(sequence):
            draft.first_rows.append(row)

    def _has_prompt_left(self, sequence: Sequence) -> bool:
        row = sequence.row
        return row is not None and int(self._rows.num_scheduled[row]) < len(sequence.token_ids)

    def _admit(self, draft: _Draft) -> None:
        """Starts waiting sequences, in order, while rows, blocks and the token budget last."""
        while draft.budget > 0 and self._rows.num_free:
            sequence = self._waiting.peek()
            if sequence is None:
                return
            prefix = self._blocks.cached_prefix(sequence)
            wanted = self._blocks.num_blocks_for(len(sequence.token_ids) + 1) - len(prefix)
            reserve = int(WATERMARK * self._blocks.num_blocks) if self._running else 0
            if wanted + reserve > self._blocks.num_free_beside(prefix):
                return
            self._start(draft, self._waiting.pop(), prefix)

    def _start(self, draft: _Draft, sequence: Sequence, prefix: list[int]) -> None:
        row = self._rows.take(sequence.token_ids, sequence.limit, draft.step_id)
        num_cached_tokens = len(prefix) * self._blocks.block_size
        num_tokens = min(draft.budget, len(sequence.token_ids) - num_cached_tokens)
        draft.budget -= num_tokens
        self._enter(sequence, row, num_cached_tokens, draft.now)
        self._blocks.open(row, sequence, prefix)
        self._blocks.grow(row, num_cached_tokens + num_tokens)
        draft.new.append(
            NewSequence(
                row=row,
                seq_id=sequence.seq_id,
                token_ids=np.frombuffer(sequence.token_ids.tobytes(), np.int32),
                num_computed_tokens=num_cached_tokens,
                block_ids=self._blocks.tables.row(row).copy(),
                sampling=sequence.row_sampling(),
            )
        )
        self._plan_chunk(draft, sequence, num_tokens)
        if self._has_prompt_left(sequence):
            self._prefilling.append(sequence)
            self._prefilling.sort(key=lambda prefilling: prefilling.seq_id)

    def _enter(self, sequence: Sequence, row: int, num_cached_tokens: int, now: float) -> None:
        """Fills in a row's account of its sequence."""
        sequence.row = row
        self._running[row] = sequence
        self._rows.num_scheduled[row] = num_cached_tokens
        self._rows.handle[row] = sequence.handle
        self._rows.gateway[row] = self._gateways[sequence.gateway]
        self._rows.stops_at_eos[row] = bool(sequence.eos_token_ids)
        self._rows.has_own_stops[row] = bool(sequence.sampling.stop_token_ids)
        if sequence.first_run_at is None:
            sequence.num_cached_tokens = num_cached_tokens
        sequence.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_cached_tokens)
        sequence.num_lost_tokens = 0
        sequence.started(now)

    def _commit(self, draft: _Draft, advancing: IntArray) -> StepPlan:
        """Moves the state on to after the step, and writes the plan."""
        rows = self._rows
        held = np.flatnonzero(rows.decoding).astype(np.int32)
        held = NO_INTS if held.size == advancing.size else held[~np.isin(held, advancing)]
        rows.num_scheduled[advancing] += 1
        if (rows.num_scheduled[advancing] >= rows.limit[advancing] - 1).any():
            self._advancing = None
        sampling = advancing
        if draft.first_rows:
            first = np.asarray(draft.first_rows, np.int32)
            rows.decoding[first] = True
            self._advancing = None
            sampling = np.sort(np.concatenate([advancing, first]))
        self._in_flight.append(_InFlight(draft.step_id, sampling, draft.first_rows))
        released, self._released = self._released, []
        tables = self._blocks.tables
        num_slots = int(tables.lens.sum()) * self._blocks.block_size
        self.stats.count_step(self._blocks.num_held_blocks, num_slots, self.num_used_tokens)
        return StepPlan(
            step_id=draft.step_id,
            epoch=self._epoch,
            digest=tables.digest,
            released_rows=np.asarray(released, np.int32),
            new=tuple(draft.new),
            appended_rows=np.asarray(draft.appended_rows, np.int32),
            appended_ids=np.asarray(draft.appended_ids, np.int32),
            held_rows=held,
            chunk_rows=np.asarray(draft.chunk_rows, np.int32),
            chunk_lens=np.asarray(draft.chunk_lens, np.int32),
        )

    # Taking in results

    def apply(self, result: StepResult, now: float) -> list[tuple[bytes, TokenBatch]]:
        """Advances the sequences of the earliest step in flight; returns the news, as (gateway, news).

        Raises:
            ProtocolError: the result is of another step or epoch, or has the wrong number of tokens.
        """
        step = self._take_step(result)
        self._blocks.lift_fences(step.step_id)
        rows, token_ids, logprobs = step.rows, result.token_ids, result.logprobs
        alive = self._rows.entered_at_step[rows] <= step.step_id
        if not alive.all():  # stopped, aborted or preempted since: their tokens are dropped
            kept = np.flatnonzero(alive).astype(np.int32)
            rows, token_ids = rows[kept], token_ids[kept]
            logprobs = None if logprobs is None else logprobs.select(kept)
        for row in self._rows.full_tails(rows).tolist():
            self._flush(row)
        self._rows.append(rows, token_ids)
        self._note_first_tokens(step, now)
        handles, gateways = self._rows.handle[rows], self._rows.gateway[rows]
        finished = self._end_finished(rows, token_ids, now)
        return self._news(step.step_id, gateways, handles, token_ids, logprobs, finished)

    def _take_step(self, result: StepResult) -> _InFlight:
        if not self._in_flight:
            raise ProtocolError(f"a result of step {result.step_id} came, and no step is in flight")
        step = self._in_flight[0]
        got, due = (result.epoch, result.step_id), (self._epoch, step.step_id)
        if got != due:
            raise ProtocolError(f"the result of (epoch, step) {got} came, {due} is due")
        if result.token_ids.size != step.rows.size:
            raise ProtocolError(f"step {due} samples {step.rows.size} tokens, {result.token_ids.size} came")
        return self._in_flight.popleft()

    def _flush(self, row: int) -> None:
        """Moves a full block of tokens out of the row and makes it findable; its KV has been computed."""
        sequence = self._running[row]
        start = int(self._rows.num_flushed[row])
        end = start + self._blocks.block_size
        sequence.token_ids[start:] = array("i", self._rows.tail[row].tobytes())
        self._rows.num_flushed[row] = end
        self._blocks.publish(row, sequence, start, end)

    def _note_first_tokens(self, step: _InFlight, now: float) -> None:
        for row in step.first_rows:
            if self._rows.entered_at_step[row] <= step.step_id:
                sequence = self._running[row]
                sequence.first_token_at = sequence.first_token_at or now

    def _end_finished(self, rows: IntArray, token_ids: IntArray, now: float) -> list[tuple[bytes, Finish]]:
        """Ends the sequences that these tokens stop, as (gateway, account)."""
        state = self._rows
        ends = state.num_tokens[rows] >= state.limit[rows]
        at_eos = (token_ids[:, None] == self._eos).any(axis=1) & state.stops_at_eos[rows]
        own_stops = state.has_own_stops[rows]
        stopped_by: dict[int, int] = {}
        for position in np.flatnonzero(own_stops).tolist():
            row, token_id = int(rows[position]), int(token_ids[position])
            if not at_eos[position] and token_id in self._running[row].sampling.stop_token_ids:
                stopped_by[row] = token_id
                ends[position] = True
        ends |= at_eos
        finished = []
        for position in np.flatnonzero(ends).tolist():
            row = int(rows[position])
            stopped = at_eos[position] or row in stopped_by
            sequence = self._running[row]
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            finish = sequence.finish(reason, int(state.num_tokens[row]), now, stopped_by.get(row))
            finished.append((sequence.gateway, finish))
            del self._by_handle[sequence.gateway, sequence.handle]
            self._release_row(sequence)
        self.stats.num_finished += len(finished)
        return finished

    def _news(
        self,
        step_id: int,
        gateways: IntArray,
        handles: IntArray,
        token_ids: IntArray,
        logprobs: Logprobs | None,
        finished: list[tuple[bytes, Finish]],
    ) -> list[tuple[bytes, TokenBatch]]:
        """One TokenBatch for each gateway that has news."""
        if not handles.size:
            return []
        if len(self._gateways) == 1:
            ends = tuple(finish for _, finish in finished)
            return [(next(iter(self._gateways)), TokenBatch(step_id, handles, token_ids, logprobs, ends))]
        news = []
        for gateway, number in self._gateways.items():
            mine = np.flatnonzero(gateways == number).astype(np.int32)
            if mine.size:
                ends = tuple(finish for owner, finish in finished if owner == gateway)
                own_logprobs = None if logprobs is None else logprobs.select(mine)
                news.append(
                    (gateway, TokenBatch(step_id, handles[mine], token_ids[mine], own_logprobs, ends))
                )
        return news

    # Rows

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Takes a running sequence's blocks; it waits in its old place and is computed again.

        A token of it that is in flight is dropped and will be sampled again, the same.
        """
        row = _row_of(sequence)
        sequence.token_ids[int(self._rows.num_flushed[row]) :] = array(
            "i", self._rows.unflushed(row).tobytes()
        )
        sequence.num_lost_tokens = int(self._rows.num_scheduled[row])
        sequence.preempted_at = now
        self._release_row(sequence)
        self._waiting.push(sequence)
        self.stats.num_preemptions += 1

    def _release_row(self, sequence: Sequence) -> None:
        row = _row_of(sequence)
        self._blocks.close(row, self._in_flight[-1].step_id if self._in_flight else None)
        self._rows.free(row)
        self._released.append(row)
        self._advancing = None
        del self._running[row]
        sequence.row = None
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)

    def _refusal(self, gateway: bytes, submit: Submit) -> QuireError | None:
        num_prompt_tokens = len(submit.prompt_token_ids)
        most = self.config.max_servable_tokens
        if (gateway, submit.handle) in self._by_handle:
            return ProtocolError(f"handle {submit.handle} is in use")
        if not 1 <= num_prompt_tokens < most:
            return InvalidRequest("prompt", f"has {num_prompt_tokens} tokens, must have 1 to {most - 1}")
        if len(self._waiting) >= self.config.scheduler.max_queue_len:
            return Overloaded(f"{len(self._waiting)} requests are waiting already; come back later")
        return None

    def check_integrity(self) -> None:
        """Recounts blocks, rows and queues; raises AssertionError on the first thing that is not as it should be."""
        self._blocks.check_integrity()
        rows, tables = self._rows, self._blocks.tables
        assert len(self._running) + rows.num_free == rows.num_rows, "rows are lost or doubled"
        assert len(self._by_handle) == len(self._running) + len(self._waiting), (
            "sequences are lost or doubled"
        )
        for row, sequence in self._running.items():
            assert sequence.row == row, (
                f"sequence {sequence.seq_id} believes in row {sequence.row}, has {row}"
            )
            held, planned = int(tables.lens[row]), int(rows.num_scheduled[row])
            assert held == self._blocks.num_blocks_for(planned), (
                f"row {row} has {held} blocks for {planned} tokens"
            )
            assert planned <= int(rows.num_tokens[row]) + len(self._in_flight), f"row {row} runs ahead"


def _row_of(sequence: Sequence) -> int:
    assert sequence.row is not None, f"sequence {sequence.seq_id} is not running"
    return sequence.row
