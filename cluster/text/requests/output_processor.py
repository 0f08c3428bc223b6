"""OutputProcessor: turns the sequence updates of one request into the events of its stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ....proto.stream import Finish, FinishReason
from ..chat_format.deltas import ChatDelta
from .detokenizer import Detokenizer, NoText
from .outputs import (
    CompletionDelta,
    CompletionFinished,
    OutputEvent,
    PooledVector,
    PositionLogprobs,
    PromptLogprobsDelta,
    ScoredTokens,
    Usage,
    position_logprobs,
)
from .request import Request
from .sequence_update import SequenceUpdate, TokenLogprobs
from .tokenizer import Tokenizer

CompletionEvent = CompletionDelta | CompletionFinished

# Enough to find a prompt token whose text is shown.
_MAX_CONTEXT_TOKENS = 8


class OutputProcessor:
    """Detokenizes the sequences of one request and emits their events; used by the gateway and by LLM.

    Events are emitted as updates come. With `best_of` they are held back until all sequences have ended; then those
    of the n most likely sequences are emitted, best first, with new indices.

    Args:
        decode_logprobs: fill in `Logprob.decoded_token`.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, *, decode_logprobs: bool = False) -> None:
        self._request = request
        self._sampling = request.sampling
        self._decode_token = tokenizer.token_text if decode_logprobs and self._sampling.detokenize else None
        self._sequences = [
            _SequenceOutput(request, tokenizer, index, self._decode_token)
            for index in range(request.sampling.num_sequences)
        ]
        self._num_open = len(self._sequences)
        self._num_deltas = 0
        self._held_back: list[list[CompletionEvent]] = [[] for _ in self._sequences]
        self._num_scored = 1  # prompt tokens whose log-probabilities were emitted; the first token has none

    @property
    def is_finished(self) -> bool:
        """Every sequence has ended."""
        return self._num_open == 0

    def has_stop_string(self, index: int) -> bool:
        """Return whether a stop string was found: the caller must stop the sequence in the scheduler."""
        return self._sequences[index].has_stop_string

    def process(self, index: int, update: SequenceUpdate) -> list[OutputEvent]:
        """Return the events that an update of the sequence `index` causes.

        Raises:
            QuireError: the sequence ended with this error, and with it the request.
        """
        events = self._sequences[index].process(update, self._num_deltas + 1)
        self._num_open -= update.finish is not None
        of_prompt: list[OutputEvent] = [*self._prompt_logprobs(update)]
        if update.pooled is not None:
            of_prompt.append(PooledVector(update.pooled))
        if self._sampling.is_ranked:
            self._held_back[index] += events
            return [*of_prompt, *(self._ranked() if self.is_finished else ())]
        self._num_deltas += bool(events) and isinstance(events[0], CompletionDelta)
        return [*of_prompt, *events]

    def _prompt_logprobs(self, update: SequenceUpdate) -> list[PromptLogprobsDelta]:
        """Return the log-probabilities not emitted yet: a migrated request may compute those of its prompt again."""
        num_top = self._sampling.prompt_logprobs
        if num_top is None or not update.prompt_logprobs:
            return []
        prompt = self._request.prompt_token_ids
        events = []
        for scores in update.prompt_logprobs:
            start = self._num_scored
            new = scores.rows(scores.index >= start)
            self._num_scored += len(new.index)
            if len(new.index):
                token_ids = prompt[start : self._num_scored].tolist()
                entries = ScoredTokens(token_ids, new, num_top, self._decode_token)
                events.append(PromptLogprobsDelta(start, token_ids, entries))
        return events

    def _ranked(self) -> Iterable[CompletionEvent]:
        """Yield the events of the n most likely sequences, best first."""
        order = sorted(range(len(self._sequences)), key=lambda index: -self._sequences[index].logprob_sum)
        for rank, index in enumerate(order[: self._sampling.n]):
            for event in self._held_back[index]:
                if isinstance(event, CompletionDelta):
                    self._num_deltas += 1
                    yield replace(event, index=rank, sequence_number=self._num_deltas)
                else:
                    yield replace(event, index=rank)


def _context(request: Request) -> list[int]:
    """Return the ids that the text continues: a completion follows its prompt, a message of a chat begins anew."""
    is_chat = request.new_parser is not None
    return [] if is_chat else request.prompt_token_ids[-_MAX_CONTEXT_TOKENS:].tolist()


class _SequenceOutput:
    """Text and log-probabilities of one sequence of a request.

    Attributes:
        logprob_sum: sum of its tokens' log-probabilities, as far as they were reported.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, index: int, decode_token: Callable[[int], str] | None
    ) -> None:
        self._request = request
        self._index = index
        self._decode_token = decode_token
        sampling = request.sampling
        self._keeps_stop = sampling.include_stop_str_in_output
        self._detokenizer = (
            Detokenizer(
                tokenizer,
                sampling.stop,
                context=_context(request),
                min_tokens=sampling.min_tokens,
                skip_special_tokens=sampling.skip_special_tokens,
                keep_stop=self._keeps_stop,
            )
            if sampling.detokenize
            else NoText()
        )
        self._parser = None if request.new_parser is None else request.new_parser()
        self._num_tokens = 0
        self.logprob_sum = 0.0

    @property
    def has_stop_string(self) -> bool:
        return self._detokenizer.stop_string is not None

    def process(self, update: SequenceUpdate, number: int) -> list[CompletionEvent]:
        """Return a delta with this number, the end, both or nothing.

        Raises:
            QuireError: the sequence ended with this error.
        """
        finish = update.finish
        if finish is not None and finish.reason is FinishReason.ERROR:
            raise finish.to_error()
        delta = None if self.has_stop_string else self._delta(update, number)
        finished = None if finish is None else self._finished(finish)
        return [event for event in (delta, finished) if event is not None]

    def _delta(self, update: SequenceUpdate, number: int) -> CompletionDelta | None:
        finish = update.finish
        # The token that stopped the sequence is one of its tokens, but part of its text only if requested.
        stopped = finish is not None and finish.reason is FinishReason.STOP and bool(update.token_ids)
        num_without_text = int(stopped and not self._keeps_stop)
        num_with_text = len(update.token_ids) - num_without_text
        text, num_tokens = self._detokenize(update.token_ids[:num_with_text])
        if not self.has_stop_string:
            num_tokens += num_without_text
            if finish is not None:
                text += self._rest()
        is_last = self.has_stop_string or finish is not None
        chat = self._parse(text, is_last=is_last)
        if not num_tokens and not text and not chat:
            return None
        self._num_tokens += num_tokens
        token_ids, entries = update.token_ids[:num_tokens], update.logprobs[:num_tokens]
        for entry in entries:
            self.logprob_sum += entry.chosen
        logprobs = self._logprobs(token_ids, entries)
        return CompletionDelta(self._index, text, token_ids, logprobs, number, chat, is_last)

    def _detokenize(self, token_ids: list[int]) -> tuple[str, int]:
        """Return the new text, and the number of tokens that belong to the sequence."""
        if self._parser is None or self._parser.reasoning_tokens is None:
            return self._detokenizer.push(token_ids)
        texts: list[str] = []
        for token_id in token_ids:
            texts.append(self._detokenizer.push((token_id,))[0])
            if self.has_stop_string:
                break
        self._parser.reasoning_tokens.push(map(len, texts))
        return "".join(texts), len(texts)

    def _rest(self) -> str:
        """Return the text that was held back."""
        rest = self._detokenizer.finish()
        if self._parser is not None and self._parser.reasoning_tokens is not None:
            self._parser.reasoning_tokens.push_text(len(rest))
        return rest

    def _parse(self, text: str, *, is_last: bool) -> tuple[ChatDelta, ...] | None:
        """Return what the text adds to the message of a chat."""
        if self._parser is None:
            return None
        deltas = self._parser.push(text)
        return tuple(deltas + self._parser.finish() if is_last else deltas)

    def _logprobs(self, token_ids: list[int], entries: list[TokenLogprobs]) -> list[PositionLogprobs]:
        num_top = self._request.sampling.logprobs
        if num_top is None:
            return []
        pairs = zip(token_ids, entries, strict=True)
        return [_position_logprobs(token_id, entry, num_top, self._decode_token) for token_id, entry in pairs]

    def _finished(self, finish: Finish) -> CompletionFinished:
        stop_string = self._detokenizer.stop_string
        reason = str(FinishReason.STOP if self.has_stop_string else finish.reason)
        return CompletionFinished(
            index=self._index,
            finish_reason=reason if self._parser is None else self._parser.finish_reason(reason),
            stop_reason=stop_string if self.has_stop_string else finish.stop_token_id,
            usage=self._usage(finish),
            timings=finish.timings,
            cumulative_logprob=self.logprob_sum if self._request.reports_logprobs else None,
            score=finish.score,
            weights_version=finish.weights_version,
        )

    def _usage(self, finish: Finish) -> Usage:
        counter = None if self._parser is None else self._parser.reasoning_tokens
        return Usage(
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self._num_tokens,
            cached_tokens=finish.num_cached_tokens,
            reasoning_tokens=0 if counter is None else counter.count,
        )


def _position_logprobs(
    token_id: int, entry: TokenLogprobs, num_top: int, decode: Callable[[int], str] | None
) -> PositionLogprobs:
    """Convert an entry, without the top tokens that only other requests of its step asked for."""
    top_ids, top_logprobs = entry.top_token_ids[:num_top], entry.top_logprobs[:num_top]
    return position_logprobs(token_id, entry.chosen, entry.rank, top_ids, top_logprobs, decode)
