"""ResultProcessor: applies step results to sequences and collects updates for gateways."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.errors import ProtocolError
from ...proto.step import Logprobs, PromptLogprobs, StepResult
from ...proto.stream import Finish, FinishReason, TokenBatch
from ..sequences.beam_group import BeamGroup
from ..sequences.beam_search import BeamHypothesis
from ..sequences.sequence import Sequence
from .state import InFlight, SchedulerState, row_of

News = list[tuple[bytes, TokenBatch]]


class ResultProcessor:
    """Applies results to one scheduler's state."""

    def __init__(self, state: SchedulerState, epoch: int) -> None:
        self._state = state
        self._epoch = epoch
        self._is_fair = state.config.scheduler.policy == "fair"
        self._eos = np.asarray(state.config.model.eos_token_ids, np.int32)

    def take(self, result: StepResult, now: float) -> News:
        """Advances the sequences of the earliest step in flight; returns the news, as (gateway, news).

        Raises:
            ProtocolError: the result is of another step or epoch, or has the wrong number of tokens.
        """
        state, rows_state = self._state, self._state.rows
        step = self._take_step(result)
        state.blocks.lift_fences(step.step_id)
        state.throughput.count_step(step.num_tokens, step.planned_at, now)
        self._learn_costs(step, result)
        rows, token_ids, logprobs = step.rows, result.token_ids, result.logprobs
        alive = rows_state.entered_at_step[rows] <= step.step_id
        if not alive.all():  # stopped, aborted or preempted since: their tokens are dropped
            rows, token_ids, logprobs = _select(alive, rows, token_ids, logprobs)
        self._note_first_tokens(step, now)
        scores = self._take_scores(step, result.prompt_logprobs)
        is_beam = rows_state.is_beam[rows]
        if is_beam.any():
            self._take_beams(rows, is_beam, logprobs, now)
            rows, token_ids, logprobs = _select(~is_beam, rows, token_ids, logprobs)
        self._append(rows, token_ids)
        handles, gateways = rows_state.handle[rows], rows_state.gateway[rows]
        finished = self._end_finished(rows, token_ids, now)
        return scores + self._news(step.step_id, gateways, handles, token_ids, logprobs, finished)

    def _learn_costs(self, step: InFlight, result: StepResult) -> None:
        """A step of few tokens takes as long as one of many, and tells nothing of how fast prompts are computed."""
        costs, budget = self._state.costs, self._state.config.scheduler.max_num_batched_tokens
        if 2 * step.num_prompt_tokens >= budget or costs.has_launched:
            seconds = sum(result.stage_times.get(stage, 0.0) for stage in ("forward", "sample"))
            costs.observe(step.num_tokens, seconds, is_done=step.rows.size > 0)

    def _take_step(self, result: StepResult) -> InFlight:
        in_flight = self._state.in_flight
        if not in_flight:
            raise ProtocolError(f"a result of step {result.step_id} came, and no step is in flight")
        step = in_flight[0]
        got, due = (result.epoch, result.step_id), (self._epoch, step.step_id)
        if got != due:
            raise ProtocolError(f"the result of (epoch, step) {got} came, {due} is due")
        if result.token_ids.size != step.rows.size:
            raise ProtocolError(f"step {due} samples {step.rows.size} tokens, {result.token_ids.size} came")
        return in_flight.popleft()

    def _append(self, rows: IntArray, token_ids: IntArray) -> None:
        """One more known token a row."""
        full = self._state.rows.full_tails(rows)
        if full.size:
            self._flush(full)
        self._state.rows.append(rows, token_ids)

    def _flush(self, rows: IntArray) -> None:
        """Moves a full block of tokens out of each row and makes it findable; its KV has been computed."""
        state, block_size = self._state, self._state.blocks.block_size
        raw, starts = state.rows.tail[rows].tobytes(), state.rows.num_flushed[rows]
        block_ids = state.blocks.tables.ids[rows, starts // block_size]
        state.rows.num_flushed[rows] = starts + block_size
        width = 4 * block_size
        for number, (row, start, block_id) in enumerate(
            zip(rows.tolist(), starts.tolist(), block_ids.tolist(), strict=True)
        ):
            sequence, tokens = state.running[row], raw[number * width : (number + 1) * width]
            del sequence.token_ids[start:]
            sequence.token_ids.frombytes(tokens)
            state.blocks.publish_next(sequence, block_id, tokens)
            if self._is_fair:
                self._charge(sequence, start, start + block_size)

    def _charge(self, sequence: Sequence, start: int, end: int) -> None:
        """Counts the sampled ones among tokens `start` to `end` as service to the sequence's tenant."""
        self._state.waiting.charge(sequence.tenant, 0, max(0, end - max(start, sequence.num_prompt_tokens)))

    def _note_first_tokens(self, step: InFlight, now: float) -> None:
        for row in step.first_rows:
            if self._state.rows.entered_at_step[row] <= step.step_id:
                sequence = self._state.running[row]
                if sequence.first_token_at is None:
                    sequence.first_token_at = now

    def _take_scores(self, step: InFlight, scores: PromptLogprobs | None) -> News:
        """Hands on the log-probabilities of prompts, but for those of sequences that have lost their rows since."""
        if scores is None:
            return []
        state, rows = self._state, scores.owners
        alive = state.rows.entered_at_step[rows] <= step.step_id
        for row, count in zip(*np.unique(rows[alive], return_counts=True), strict=True):
            state.running[int(row)].num_scored_tokens += int(count)
        news = []
        for gateway, number in state.gateways.items():
            mine = alive & (state.rows.gateway[rows] == number)
            told = scores.select(mine, state.rows.handle[rows[mine]])
            if told is not None:
                news.append((gateway, TokenBatch(step.step_id, prompt_logprobs=told)))
        return news

    # Ends

    def _end_finished(self, rows: IntArray, token_ids: IntArray, now: float) -> list[tuple[bytes, Finish]]:
        """Ends the sequences that these tokens stop, as (gateway, account)."""
        state = self._state.rows
        ends = state.num_tokens[rows] >= state.limit[rows]
        at_eos = (token_ids[:, None] == self._eos).any(axis=1) & state.stops_at_eos[rows]
        stopped_by = self._own_stops(rows, token_ids, at_eos)
        finished = []
        for position in np.flatnonzero(ends | at_eos | (stopped_by >= 0)).tolist():
            row, stop = int(rows[position]), int(stopped_by[position])
            stopped = at_eos[position] or stop >= 0
            sequence = self._state.running[row]
            self._charge(sequence, int(state.num_flushed[row]), int(state.num_tokens[row]))
            self._keep_partial(sequence)
            finish = sequence.finish(
                FinishReason.STOP if stopped else FinishReason.LENGTH,
                int(state.num_tokens[row]),
                now,
                stop_token_id=stop if stop >= 0 else None,
            )
            finished.append((sequence.gateway, finish))
            self._state.end_request((sequence.gateway, sequence.handle))
        self._state.stats.num_finished += len(finished)
        return finished

    def _own_stops(self, rows: IntArray, token_ids: IntArray, at_eos: np.ndarray) -> IntArray:
        """For each row the request's own stop token that it sampled; -1: none."""
        stopped_by = np.full(rows.size, -1, np.int32)
        for position in np.flatnonzero(self._state.rows.has_own_stops[rows] & ~at_eos).tolist():
            token_id = int(token_ids[position])
            if token_id in self._state.running[int(rows[position])].sampling.stop_token_ids:
                stopped_by[position] = token_id
        return stopped_by

    def _keep_partial(self, sequence: Sequence) -> None:
        """What is in the last block of a sequence that ends may serve its next turn."""
        row, rows = row_of(sequence), self._state.rows
        flushed = int(rows.num_flushed[row])
        num_computed = int(rows.num_tokens[row]) - 1 - flushed
        if num_computed > 0:
            last_tokens = rows.tail[row, :num_computed].copy()
            self._state.blocks.keep_partial(row, sequence, flushed // rows.block_size, last_tokens)

    # Beams

    def _take_beams(self, rows: IntArray, is_beam: np.ndarray, logprobs: Logprobs | None, now: float) -> None:
        """Hands each beam's candidates to its search, and advances the searches that have all of theirs."""
        assert logprobs is not None, "a beam's logprobs did not come"
        complete = []
        for position in np.flatnonzero(is_beam).tolist():
            sequence = self._state.running[int(rows[position])]
            (entry,) = np.flatnonzero(logprobs.index == position)
            assert sequence.beams is not None
            if sequence.beams.deposit(sequence.seq_id, logprobs.top_ids[entry], logprobs.top[entry]):
                complete.append(sequence.beams)
        for group in complete:
            self._advance_beams(group, now)

    def _advance_beams(self, group: BeamGroup, now: float) -> None:
        """The search has chosen: some beams go on in their rows, some fork, some end."""
        parents = [self._state.alive[seq_id] for seq_id in group.members]
        children = group.advance()
        if not children:
            self._end_beams(group, now)
            return
        members: list[int] = []
        continued: dict[int, int] = {}  # parent |-> the token it goes on with
        for child in children:
            parent = parents[child.parent]
            if child.parent in continued:
                members.append(self._fork(parent, child.token_id).seq_id)
            else:
                continued[child.parent] = child.token_id
                members.append(parent.seq_id)
        group.members = members
        for number, parent in enumerate(parents):
            if number in continued:
                self._choose(parent, continued[number])
            else:
                self._state.discard(parent)

    def _fork(self, parent: Sequence, token_id: int) -> Sequence:
        """A new sequence that is `parent` so far, and then `token_id`."""
        tokens = self._state.known_tokens(parent)
        tokens.append(token_id)
        child = replace(
            parent,
            seq_id=self._state.next_seq_id(),
            token_ids=tokens,
            block_digests=list(parent.block_digests),
            row=None,
            host_blocks=[],
            num_lost_tokens=0,
            is_parked=False,
        )
        self._state.add(child)
        self._state.forks.append((child, parent))
        return child

    def _choose(self, sequence: Sequence, token_id: int) -> None:
        """The sequence goes on with a token that it did not sample itself."""
        if sequence.is_parked:
            sequence.token_ids.append(token_id)
            sequence.is_parked = False
            self._state.waiting.push(sequence)
            return
        assert sequence.row is not None, "a beam that its search has candidates of waits"
        row = np.array([sequence.row], np.int32)
        self._append(row, np.array([token_id], np.int32))
        self._state.rows.frozen[row] = False
        self._state.chosen.append((sequence.row, token_id))
        self._state.invalidate_advancing_rows()

    def _end_beams(self, group: BeamGroup, now: float) -> None:
        """Tells the best answers of a search that is over."""
        first = self._state.alive[group.members[0]]
        answers = group.search.answers[: group.num_answers]
        handles = [first.handle + index for index in range(len(answers))]
        finished = tuple(
            self._beam_finish(first, answer, handle, now)
            for handle, answer in zip(handles, answers, strict=True)
        )
        lengths = [len(answer.token_ids) for answer in answers]
        token_ids = np.array([token for answer in answers for token in answer.token_ids], np.int32)
        self._state.end_request((first.gateway, first.handle))
        self._state.stats.num_finished += len(answers)
        batch = TokenBatch(0, np.repeat(np.array(handles, np.int32), lengths), token_ids, None, finished)
        self._state.news.append((first.gateway, batch))

    def _beam_finish(self, sequence: Sequence, answer: BeamHypothesis, handle: int, now: float) -> Finish:
        last = answer.token_ids[-1]
        own_stop = answer.at_eos and last not in sequence.eos_token_ids
        return sequence.finish(
            FinishReason.STOP if answer.at_eos else FinishReason.LENGTH,
            sequence.num_prompt_tokens + len(answer.token_ids),
            now,
            stop_token_id=last if own_stop else None,
            score=answer.score,
            handle=handle,
        )

    # News

    def _news(
        self,
        step_id: int,
        gateways: IntArray,
        handles: IntArray,
        token_ids: IntArray,
        logprobs: Logprobs | None,
        finished: list[tuple[bytes, Finish]],
    ) -> News:
        """One TokenBatch for each gateway that has news."""
        names = self._state.gateways
        if not handles.size:
            return []
        if len(names) == 1:
            ends = tuple(finish for _, finish in finished)
            return [(next(iter(names)), TokenBatch(step_id, handles, token_ids, logprobs, ends))]
        news = []
        for gateway, number in names.items():
            mine = gateways == number
            if mine.any():
                ends = tuple(finish for owner, finish in finished if owner == gateway)
                own_handles, own_ids, own_logprobs = _select(mine, handles, token_ids, logprobs)
                news.append((gateway, TokenBatch(step_id, own_handles, own_ids, own_logprobs, ends)))
        return news


def _select(
    mask: np.ndarray, rows: IntArray, token_ids: IntArray, logprobs: Logprobs | None
) -> tuple[IntArray, IntArray, Logprobs | None]:
    """The entries under a mask, of arrays that go together."""
    kept = np.flatnonzero(mask).astype(np.int32)
    return rows[kept], token_ids[kept], None if logprobs is None else logprobs.select(kept)
