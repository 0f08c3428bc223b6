"""ResultProcessor: applies step results to sequences and builds the TokenBatches for gateways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ....proto.block_tables import IntArray, RowArray, runs_of
from ....proto.errors import InvalidRequest, ProtocolError
from ....proto.pooling import Pooled
from ....proto.step import Logprobs, PromptLogprobs, StepResult
from ....proto.stream import Finish, FinishReason, TokenBatch
from ...sequences.beam_group import BeamGroup
from ...sequences.beam_search import BeamHypothesis
from ...sequences.sequence import Sequence
from ..replies.outbox import Outgoing
from ..state import SchedulerState, row_of
from ..steps.in_flight import InFlightStep
from .observers import StepObserver, num_accepted

Row = TypeVar("Row", bound=np.signedinteger)


class ResultProcessor:
    """The effect of step results on one scheduler's state.

    Args:
        observers: learn from the result of each step that computed tokens.
    """

    def __init__(self, state: SchedulerState, epoch: int, observers: Iterable[StepObserver]) -> None:
        self._state = state
        self.epoch = epoch
        self._observers = tuple(observers)
        self._eos = [np.int32(token_id) for token_id in state.config.model.eos_token_ids]

    def apply(self, step: InFlightStep, result: StepResult, now: float) -> Outgoing:
        """Advance the sequences of a step; return the messages for gateways.

        Args:
            step: the `due_step` of the result.

        Raises:
            ProtocolError: the result has the wrong number of tokens.
        """
        state, rows_state = self._state, self._state.rows
        _check_counts(step, result)
        state.in_flight.pop()
        state.blocks.free_fenced(step.step_id)
        if step.has_results:  # sampling gathers from all ranks, after they have moved blocks and written KV
            state.blocks.confirm_fills(step.step_id)
        if state.lora is not None and result.lora_reports:
            for reference, error in state.lora.on_reports(result.lora_reports).items():
                state.fail_adapter(reference, error)
        if result.kv_reports:
            state.kv_moves.on_reports(result.kv_reports, now, state.in_flight.newest_id)
        if result.stored_reports:
            state.blocks.stored.on_reports(result.stored_reports)
        state.send_lent(step.step_id)
        if not step.num_tokens:
            return []  # only adapters or blocks were read or written
        for observer in self._observers:
            observer.observe(step, result, now)
        if step.draft_lens is not None:
            self._retract_rejected(step, step.draft_lens, result)
        self._fail_rows(step, result)
        rows, token_ids, logprobs = _rows_of_tokens(step, result), result.token_ids, result.logprobs
        # Whose tokens are these? A result is late: since this step was planned, one or two further steps were, and
        # sequences were stopped, aborted or preempted. So a row of the step may be free now, or may have another
        # sequence, which entered it later. A token belongs to the row's sequence only if that entered the row for
        # this step or an earlier one. A free row has entered at NEVER, which is later than all steps, so that one
        # comparison finds both cases. The tokens of other rows are dropped: a sequence that was preempted samples
        # them again with the same seed and position, and gets the same ones. Nearly always no row was freed
        # meanwhile, which `num_freed` tells without a look at the rows. A step's blocks need no such test: those of a
        # freed row are fenced by the newest step in flight, and `free_fenced` above frees them in order.
        if rows_state.num_freed != step.num_freed:
            alive = rows_state.entered_at_step[rows] <= step.step_id
            if not alive.all():  # stopped, aborted or preempted since: their tokens are dropped
                rows, token_ids, logprobs = _select(alive, rows, token_ids, logprobs)
        self._set_first_token_times(step, now)
        outgoing = self._prompt_logprobs(step, result.prompt_logprobs) + self._pooled(
            step, result.pooled, now
        )
        if rows_state.num_beam_rows:
            is_beam = rows_state.is_beam[rows]
            if is_beam.any():
                self._add_candidates(rows, is_beam, logprobs, now)
                rows, token_ids, logprobs = _select(~is_beam, rows, token_ids, logprobs)
        if result.token_counts.size:
            at_eos = self._at_eos(rows, token_ids)
            rows, token_ids, logprobs, last = self._append_runs(rows, token_ids, logprobs, at_eos)
            at_eos = self._at_eos(rows, token_ids) if at_eos.size > rows.size else at_eos
            finished = self._finish_sequences(rows[last], token_ids[last], at_eos[last], now)
        else:
            self._detect_repetitions(rows, token_ids)
            self._append(rows, token_ids)
            finished = self._finish_sequences(rows, token_ids, self._at_eos(rows, token_ids), now)
        outgoing += self._token_batches(step.step_id, rows, token_ids, logprobs, finished)
        self._hand_off_prefilled(rows, now)
        return outgoing

    def _hand_off_prefilled(self, rows: RowArray, now: float) -> None:
        """Let sequences leave of which another replica computes all but the first token.

        Their ends go through the outbox, which is sent after the tokens. One whose blocks cannot be lent stays.
        """
        if not self._state.num_prefill_only:
            return
        for row in rows.tolist():
            sequence = self._state.running.get(row)
            if sequence is not None and sequence.prefill_only:
                self._state.hand_off_prefilled(sequence, now)

    def due_step(self, result: StepResult) -> InFlightStep:
        """Return the step of a result. Raises ProtocolError if the result of another one is due."""
        step = self._state.in_flight.oldest
        if step is None:
            raise ProtocolError(f"a result of step {result.step_id} came, and no step is in flight")
        got, due = (result.epoch, result.step_id), (self.epoch, step.step_id)
        if got != due:
            raise ProtocolError(f"the result of (epoch, step) {got} came, {due} is due")
        return step

    def _retract_rejected(self, step: InFlightStep, num_planned: IntArray, result: StepResult) -> None:
        """Take back drafted tokens that were planned and rejected."""
        state, rows = self._state, step.rows
        num_rejected, is_affected = num_planned - num_accepted(result, rows.size), num_planned > 0
        if state.rows.num_freed != step.num_freed:
            is_affected &= state.rows.entered_at_step[rows] <= step.step_id
        if np.count_nonzero(is_affected) < is_affected.size:
            rows, num_rejected = rows[is_affected], num_rejected[is_affected]
        state.retract_drafts(rows, num_rejected)

    def _fail_rows(self, step: InFlightStep, result: StepResult) -> None:
        """End the requests that cannot go on; the other rows of the step are not affected."""
        for failed in result.failed_rows:
            if self._state.rows.entered_at_step[failed.row] <= step.step_id:
                sequence = self._state.running[failed.row]
                error = InvalidRequest(failed.parameter, f"the output cannot go on: {failed.reason}")
                self._state.fail_request((sequence.gateway, sequence.handle), error)

    def _set_first_token_times(self, step: InFlightStep, now: float) -> None:
        for row in step.first_rows:
            if self._state.rows.entered_at_step[row] <= step.step_id:
                sequence = self._state.running[row]
                if sequence.first_token_at is None:
                    sequence.first_token_at = now

    def _prompt_logprobs(self, step: InFlightStep, scores: PromptLogprobs | None) -> Outgoing:
        """Return the log-probabilities of prompts, except of sequences that have lost their rows since."""
        if scores is None:
            return []
        state, rows = self._state, scores.owners
        alive = state.rows.entered_at_step[rows] <= step.step_id
        for row, count in zip(*np.unique(rows[alive], return_counts=True), strict=True):
            state.running[int(row)].num_scored_tokens += int(count)
        outgoing = []
        of_living = np.flatnonzero(alive)
        for gateway, indices in state.requests.by_gateway(state.rows.gateway[rows[of_living]]):
            mask = np.zeros(rows.size, np.bool_)
            mask[of_living[indices]] = True
            selected = scores.select(mask, state.rows.handle[rows[mask]])
            if selected is not None:
                outgoing.append((gateway, TokenBatch(step.step_id, prompt_logprobs=selected)))
        return outgoing

    def _pooled(self, step: InFlightStep, pooled: Pooled | None, now: float) -> Outgoing:
        """End the pooled sequences; return their vectors, except of sequences that have lost their rows since."""
        if pooled is None:
            return []
        state, rows = self._state, pooled.owners
        alive = state.rows.entered_at_step[rows] <= step.step_id
        # A row keeps its handle and gateway after its sequence has ended.
        ends = [(row, self._finish_pooled(row, now)) for row in rows[alive].tolist()]
        outgoing = []
        of_living = np.flatnonzero(alive)
        for gateway, indices in state.requests.by_gateway(state.rows.gateway[rows[of_living]]):
            mask = np.zeros(rows.size, np.bool_)
            mask[of_living[indices]] = True
            selected = pooled.select(mask, state.rows.handle[rows[mask]])
            if selected is not None:
                finished = tuple(ends[index][1] for index in indices.tolist())
                outgoing.append((gateway, TokenBatch(step.step_id, finished=finished, pooled=selected)))
        state.stats.count_finished(len(ends))
        return outgoing

    def _finish_pooled(self, row: int, now: float) -> Finish:
        sequence = self._state.running[row]
        sequence.first_token_at = now
        finish = sequence.finish(FinishReason.STOP, sequence.num_prompt_tokens, now)
        self._state.end_request((sequence.gateway, sequence.handle))
        return finish

    # Tokens

    def _append_runs(
        self,
        rows: RowArray,
        token_ids: IntArray,
        logprobs: Logprobs | None,
        at_eos: npt.NDArray[np.bool_],
    ) -> tuple[RowArray, IntArray, Logprobs | None, RowArray]:
        """Append one or more known tokens to each row, up to the first that ends its sequence.

        Args:
            rows: [n], the row of each token; the tokens of a row are adjacent.
            at_eos: [n], as `_at_eos` returns it.

        Returns:
            The arguments without tokens after an end, and the positions of each row's last token in them.
        """
        ends = [*at_eos.nonzero()[0].tolist(), *self._own_stops(rows, token_ids, at_eos)]
        ends += self._detect_repetitions(rows, token_ids)
        if ends:
            keep = np.ones(rows.size, np.bool_)
            for end in sorted(ends):
                keep[end + 1 :][rows[end + 1 :] == rows[end]] = False
            rows, token_ids, logprobs = _select(keep, rows, token_ids, logprobs)
        starts, lens = runs_of(rows)
        if not self._state.rows.append_runs(rows, token_ids, starts, lens):
            for place in range(max(lens.tolist(), default=0)):
                tokens = starts[lens > place] + place
                self._append(rows[tokens], token_ids[tokens])
        return rows, token_ids, logprobs, starts + lens - 1

    def _append(self, rows: RowArray, token_ids: IntArray) -> None:
        """Append one known token to each row."""
        full = self._state.rows.full_tails(rows)
        if full.size:
            self.flush(full)
        self._state.rows.append(rows, token_ids)

    def flush(self, rows: RowArray) -> None:
        """Move a full block of tokens out of each row and publish the block; its KV has been computed."""
        self.publish(rows, *self._state.rows.flush(rows))

    def publish(self, rows: RowArray, raw: bytes, starts: IntArray) -> None:
        """Pass a block of tokens, which has left its row's tail, to each row's sequence and to the prefix cache.

        Args:
            raw: int32 tokens of one block of each row, one after the other.
            starts: position of each one's first token.
        """
        state, block_size = self._state, self._state.blocks.block_size
        sequences = [state.running[row] for row in rows.tolist()]
        blocks = [raw[at : at + 4 * block_size] for at in range(0, len(raw), 4 * block_size)]
        for sequence, start, tokens in zip(sequences, starts.tolist(), blocks, strict=True):
            del sequence.token_ids[start:]
            sequence.token_ids.frombytes(tokens)
        state.blocks.prefixes.publish_next(
            sequences, state.blocks.rows.blocks_at(rows, starts // block_size), blocks
        )
        num_output_tokens = starts + block_size - state.rows.num_prompt_tokens[rows]
        num_output_tokens = np.minimum(np.maximum(num_output_tokens, 0), block_size)  # np.clip takes 10 us
        state.waiting.charge_outputs(sequences, num_output_tokens.tolist())

    def _charge(self, sequence: Sequence, start: int, end: int) -> None:
        """Charge the sampled tokens among tokens `start` to `end` under the fair policy."""
        num_output_tokens = max(0, end - max(start, sequence.num_prompt_tokens))
        self._state.waiting.charge(sequence, 0, num_output_tokens)

    # Ends

    def _finish_sequences(
        self, rows: RowArray, token_ids: IntArray, at_eos: npt.NDArray[np.bool_], now: float
    ) -> list[tuple[bytes, Finish]]:
        """End the sequences that these tokens, one of each row, stop; return their ends, as (gateway, Finish)."""
        state = self._state.rows
        own_stops = self._own_stops(rows, token_ids, at_eos)
        repetitions = self._repetitions(rows)
        ends = (state.num_tokens[rows] >= state.max_len[rows]) | at_eos
        if own_stops:
            ends[[*own_stops]] = True
        if repetitions:
            ends[[*repetitions]] = True
        if not np.count_nonzero(ends):  # as in most steps
            return []
        finished = []
        for position in np.flatnonzero(ends).tolist():
            row, stop = int(rows[position]), own_stops.get(position)
            sequence = self._state.running[row]
            self._charge(sequence, int(state.num_flushed[row]), int(state.num_tokens[row]))
            self._keep_partial(sequence)
            has_stopped = bool(at_eos[position]) or stop is not None
            self._state.pace.observe_output(
                int(state.num_tokens[row]) - sequence.num_prompt_tokens, has_stopped
            )
            finish = sequence.finish(
                _reason(has_stopped, position in repetitions),
                int(state.num_tokens[row]),
                now,
                stop_token_id=stop,
            )
            finished.append((sequence.gateway, finish))
            self._state.retained.keep(sequence, self._state.known_tokens(sequence), finish, now)
            self._state.end_request((sequence.gateway, sequence.handle))
        self._state.stats.count_finished(len(finished))
        return finished

    def _at_eos(self, rows: RowArray, token_ids: IntArray) -> npt.NDArray[np.bool_]:
        """Return for each row whether the model's end of sequence, which it heeds, was sampled."""
        at_eos = np.zeros(rows.size, np.bool_)
        for token_id in self._eos:
            at_eos |= token_ids == token_id
        if np.count_nonzero(at_eos):
            at_eos &= self._state.rows.stops_at_eos[rows]
        return at_eos

    def _own_stops(
        self, rows: RowArray, token_ids: IntArray, at_eos: npt.NDArray[np.bool_]
    ) -> dict[int, int]:
        """Return position in `rows` |-> the request's own stop token that was sampled."""
        if not self._state.rows.num_own_stop_rows:
            return {}
        candidates = np.flatnonzero(self._state.rows.has_own_stops[rows] & ~at_eos).tolist()
        sampled = ((position, int(token_ids[position])) for position in candidates)
        running = self._state.running
        return {
            position: token_id
            for position, token_id in sampled
            if token_id in running[int(rows[position])].sampling.stop_token_ids
        }

    def _detect_repetitions(self, rows: RowArray, token_ids: IntArray) -> list[int]:
        """Pass the tokens to the detectors of their rows; return the positions of those that end a repetition."""
        detectors = self._state.detectors
        if not detectors:
            return []
        tokens = enumerate(zip(rows.tolist(), token_ids.tolist(), strict=True))
        return [
            position
            for position, (row, token_id) in tokens
            if row in detectors and detectors[row].push((token_id,)) is not None
        ]

    def _repetitions(self, rows: RowArray) -> set[int]:
        """Return the positions in `rows` of the sequences that repeat themselves."""
        detectors = self._state.detectors
        if not detectors:
            return set()
        places = enumerate(rows.tolist())
        return {place for place, row in places if row in detectors and detectors[row].has_found}

    def _keep_partial(self, sequence: Sequence) -> None:
        """Publish the last, partly filled block of a sequence that ends, and its state, for its next turn."""
        row, rows = row_of(sequence), self._state.rows
        flushed = int(rows.num_flushed[row])
        if self._state.blocks.state_slots.is_on:
            self._keep_state(sequence)
            return
        num_computed = int(rows.num_tokens[row]) - 1 - flushed
        if num_computed > 0:
            last_tokens = rows.tail[row, :num_computed].copy()
            self._state.blocks.keep_partial(row, sequence, flushed // rows.block_size, last_tokens)

    def _keep_state(self, sequence: Sequence) -> None:
        """Publish the state of a sequence that ends, with its last block.

        The state is that of all tokens that are planned, which the steps in flight compute. They must be known.
        """
        state, rows, row = self._state, self._state.rows, row_of(sequence)
        num_planned, num_flushed = int(rows.num_scheduled[row]), int(rows.num_flushed[row])
        if num_planned <= int(rows.num_tokens[row]):
            last_tokens = rows.tail[row, : num_planned - num_flushed].copy()
            index, newest = num_flushed // rows.block_size, state.in_flight.newest_id
            state.blocks.keep_end(row, sequence, index, last_tokens, newest)

    # Beams

    def _add_candidates(
        self, rows: RowArray, is_beam: npt.NDArray[np.bool_], logprobs: Logprobs | None, now: float
    ) -> None:
        """Pass each beam's candidates to its search, and advance the searches that have those of all beams."""
        assert logprobs is not None, "the ranks sent no log-probabilities for a beam"
        complete = []
        for position in np.flatnonzero(is_beam).tolist():
            sequence = self._state.running[int(rows[position])]
            (entry,) = np.flatnonzero(logprobs.index == position)
            assert sequence.beams is not None
            if sequence.beams.add_candidates(sequence.seq_id, logprobs.top_ids[entry], logprobs.top[entry]):
                complete.append(sequence.beams)
        for group in complete:
            self._advance_beams(group, now)

    def _advance_beams(self, group: BeamGroup, now: float) -> None:
        """Apply the search's choice: some beams continue in their rows, some fork, some end."""
        parents = [self._state.alive[seq_id] for seq_id in group.members]
        continuations = group.advance()
        if not continuations:
            self._finish_beams(group, now)
            return
        members: list[int] = []
        continued: dict[int, int] = {}  # number of the parent |-> token with which it continues
        for parent_number, token_id in continuations:
            parent = parents[parent_number]
            if parent_number in continued:
                members.append(self._state.fork(parent, token_id).seq_id)
            else:
                continued[parent_number] = token_id
                members.append(parent.seq_id)
        group.members = members
        for number, parent in enumerate(parents):
            if number in continued:
                self._continue_beam(parent, continued[number])
            else:
                self._state.discard(parent)

    def _continue_beam(self, sequence: Sequence, token_id: int) -> None:
        """Append the token that the search chose, which may differ from the token that the ranks sampled."""
        if sequence.is_suspended:
            self._state.resume(sequence, token_id)
            return
        row = row_of(sequence)
        self._append(np.array([row]), np.array([token_id], np.int32))
        self._state.rows.unfreeze(row)
        self._state.deltas.select_token(row, token_id)

    def _finish_beams(self, group: BeamGroup, now: float) -> None:
        """End a search and add its best hypotheses to the outbox."""
        first = self._state.alive[group.members[0]]
        best = group.search.hypotheses[: group.num_outputs]
        if len(best) < group.num_outputs:
            problem = f"is {group.num_outputs}, and the form has only {len(best)} outputs of this length"
            self._state.fail_request((first.gateway, first.handle), InvalidRequest("sampling.n", problem))
            return
        handles = [first.handle + index for index in range(len(best))]
        finished = tuple(
            self._beam_finish(first, hypothesis, handle, now)
            for handle, hypothesis in zip(handles, best, strict=True)
        )
        lengths = [len(hypothesis.token_ids) for hypothesis in best]
        token_ids = np.array([token for hypothesis in best for token in hypothesis.token_ids], np.int32)
        self._state.end_request((first.gateway, first.handle))
        self._state.stats.count_finished(len(best))
        batch = TokenBatch(0, np.repeat(np.array(handles, np.int32), lengths), token_ids, None, finished)
        self._state.outbox.add(first.gateway, batch)

    def _beam_finish(self, sequence: Sequence, hypothesis: BeamHypothesis, handle: int, now: float) -> Finish:
        last = hypothesis.token_ids[-1]
        own_stop = hypothesis.at_eos and last not in sequence.eos_token_ids
        return sequence.finish(
            FinishReason.STOP if hypothesis.at_eos else FinishReason.LENGTH,
            sequence.num_prompt_tokens + len(hypothesis.token_ids),
            now,
            stop_token_id=last if own_stop else None,
            score=hypothesis.score,
            handle=handle,
        )

    # Messages

    def _token_batches(
        self,
        step_id: int,
        rows: RowArray,
        token_ids: IntArray,
        logprobs: Logprobs | None,
        finished: list[tuple[bytes, Finish]],
    ) -> Outgoing:
        """Return one TokenBatch per gateway with new tokens. Rows of finished sequences keep handle and gateway."""
        if not rows.size:
            return []
        numbers, handles = self._state.requests.gateways, self._state.rows.handle[rows]
        if len(numbers) == 1:
            ends = tuple(finish for _, finish in finished)
            return [(next(iter(numbers)), TokenBatch(step_id, handles, token_ids, logprobs, ends))]
        ends_of: dict[bytes, list[Finish]] = {}
        for gateway, finish in finished:
            ends_of.setdefault(gateway, []).append(finish)
        outgoing = []
        for gateway, indices in self._state.requests.by_gateway(self._state.rows.gateway[rows]):
            own_logprobs = None if logprobs is None else logprobs.select(indices)
            batch = TokenBatch(
                step_id, handles[indices], token_ids[indices], own_logprobs, tuple(ends_of.get(gateway, ()))
            )
            outgoing.append((gateway, batch))
        return outgoing


def _reason(is_stop: bool, is_repetition: bool) -> FinishReason:
    if is_stop:
        return FinishReason.STOP
    return FinishReason.REPETITION if is_repetition else FinishReason.LENGTH


def _rows_of_tokens(step: InFlightStep, result: StepResult) -> RowArray:
    """Return the row of each token of a result."""
    return np.repeat(step.rows, result.token_counts) if result.token_counts.size else step.rows


def _check_counts(step: InFlightStep, result: StepResult) -> None:
    """Check that each row has the tokens that the step may sample for it, or its vector. Raises ProtocolError."""
    pooled_rows = () if result.pooled is None else tuple(result.pooled.owners.tolist())
    if pooled_rows != step.pooled_rows:
        raise ProtocolError(
            f"step {step.step_id} pools rows {step.pooled_rows}, vectors of {pooled_rows} came"
        )
    counts, num_rows, num_tokens = result.token_counts, step.rows.size, result.token_ids.size
    if not counts.size:
        if num_tokens != num_rows:
            raise ProtocolError(f"step {step.step_id} samples {num_rows} tokens, {num_tokens} came")
        return
    most = 1 if step.draft_lens is None else 1 + step.draft_lens
    is_complete = counts.size == num_rows and sum(counts.tolist()) == num_tokens
    if not is_complete or np.count_nonzero((counts < 1) | (counts > most)):
        raise ProtocolError(
            f"step {step.step_id} samples for {num_rows} rows; {num_tokens} tokens came, with counts "
            f"{counts.tolist()}"
        )


def _select(
    mask: npt.NDArray[np.bool_], rows: npt.NDArray[Row], token_ids: IntArray, logprobs: Logprobs | None
) -> tuple[npt.NDArray[Row], IntArray, Logprobs | None]:
    """Return the entries under a mask, of arrays that go together."""
    kept = np.flatnonzero(mask)
    return rows[kept], token_ids[kept], None if logprobs is None else logprobs.select(kept)
