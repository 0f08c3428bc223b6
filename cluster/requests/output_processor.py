"""Answers: a running request's news become the events that its caller sees, the same way for gateway and offline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...proto.errors import from_status
from ...proto.stream import Finish, FinishReason
from .detokenizer import Detokenizer
from .outputs import Delta, Finished, PromptLogprobs, TokenLogprobs, Usage
from .request import Request
from .sequence_update import SequenceUpdate
from .tokenizer import Tokenizer

Piece = PromptLogprobs | Delta | Finished


class Answers:
    """The text side of a running request: each of its answers, and the order in which they are told.

    Answers are told as they come, except where the likeliest few of more are asked for (best_of): those are told
    once all have ended, the best first, and numbered anew.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._sampling = request.sampling
        self._answers = [
            _Answer(request, tokenizer, index) for index in range(request.sampling.num_sequences)
        ]
        self._num_open = len(self._answers)
        self._num_deltas = 0
        self._untold: list[list[Delta | Finished]] = [[] for _ in self._answers]
        self._num_scored = 1  # tokens of the prompt that have been told of; the first has no log-probability

    @property
    def is_over(self) -> bool:
        """Every answer has ended."""
        return self._num_open == 0

    def is_complete(self, index: int) -> bool:
        """A stop string was found: nothing will be added, and the caller stops the sequence in the scheduler."""
        return self._answers[index].is_complete

    def take(self, index: int, news: SequenceUpdate) -> list[Piece]:
        """What is to be told now that an answer has news.

        Raises:
            QuireError: the answer ended with an error; this is it, and the whole request's.
        """
        pieces = self._answers[index].take(news)
        self._num_open -= news.finish is not None
        of_prompt = self._prompt_logprobs(news)
        if not self._sampling.is_ranked:
            return [*of_prompt, *self._numbered(pieces)]
        self._untold[index] += pieces
        return [*of_prompt, *self._numbered(self._ranked() if self.is_over else ())]

    def _prompt_logprobs(self, news: SequenceUpdate) -> list[PromptLogprobs]:
        """Those that were not told yet: a request that went on elsewhere may have scored its prompt again."""
        num_asked = self._sampling.prompt_logprobs
        if num_asked is None or not news.prompt_logprobs:
            return []
        start, entries = self._num_scored, []
        for position, entry in news.prompt_logprobs:
            if position == self._num_scored:
                entries.append(_cut(entry, num_asked))
                self._num_scored += 1
        return [PromptLogprobs(start, tuple(entries))] if entries else []

    def _ranked(self) -> Iterable[Delta | Finished]:
        """The pieces of the n likeliest answers, the best first."""
        order = sorted(range(len(self._answers)), key=lambda index: -self._answers[index].logprob_sum)
        for rank, index in enumerate(order[: self._sampling.n]):
            for piece in self._untold[index]:
                yield replace(piece, index=rank)

    def _numbered(self, pieces: Iterable[Delta | Finished]) -> list[Piece]:
        """The pieces, deltas with their place in the stream."""
        told: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Delta):
                self._num_deltas += 1
                piece = replace(piece, sequence_number=self._num_deltas)
            told.append(piece)
        return told


class _Answer:
    """The text side of one running sequence.

    Attributes:
        logprob_sum: over its tokens, as far as their log-probabilities were reported.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, index: int) -> None:
        self._request = request
        self._index = index
        sampling = request.sampling
        self._keeps_stop = sampling.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer,
            sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            keep_stop=self._keeps_stop,
        )
        self._num_tokens = 0
        self.logprob_sum = 0.0

    @property
    def is_complete(self) -> bool:
        return self._detokenizer.stop_string is not None

    def take(self, news: SequenceUpdate) -> list[Delta | Finished]:
        """A delta, the end, both or nothing. Raises the QuireError that the sequence ended with."""
        finish = news.finish
        if finish is not None and finish.reason is FinishReason.ERROR:
            raise from_status(finish.grpc_status, finish.error)
        delta = None if self.is_complete else self._delta(news)
        finished = None if finish is None else self._finished(finish)
        return [piece for piece in (delta, finished) if piece is not None]

    def _delta(self, news: SequenceUpdate) -> Delta | None:
        finish = news.finish
        # The token that stopped the sequence is part of the answer, but unless asked for not of its text.
        stopped = finish is not None and finish.reason is FinishReason.STOP and bool(news.token_ids)
        num_silent = int(stopped and not self._keeps_stop)
        text, num_tokens = self._detokenizer.push(news.token_ids[: len(news.token_ids) - num_silent])
        if not self.is_complete:
            num_tokens += num_silent
            if finish is not None:
                text += self._detokenizer.finish()
        if not num_tokens and not text:
            return None
        self._num_tokens += num_tokens
        entries = news.logprobs[:num_tokens]
        self.logprob_sum += sum(entry.chosen for entry in entries)
        num_asked = self._request.sampling.logprobs
        logprobs = () if num_asked is None else tuple(_cut(entry, num_asked) for entry in entries)
        return Delta(text, tuple(news.token_ids[:num_tokens]), logprobs, index=self._index)

    def _finished(self, finish: Finish) -> Finished:
        stop_string = self._detokenizer.stop_string
        return Finished(
            reason=FinishReason.STOP if self.is_complete else finish.reason,
            stop_reason=stop_string if self.is_complete else finish.stop_token_id,
            usage=Usage(len(self._request.prompt_token_ids), self._num_tokens, finish.num_cached_tokens),
            timings=finish.timings,
            index=self._index,
            cumulative_logprob=self.logprob_sum if self._request.reports_logprobs else None,
            score=finish.score,
        )


def _cut(entry: TokenLogprobs, num_asked: int) -> TokenLogprobs:
    """The entry without the likeliest tokens that only other requests of its step asked for."""
    if len(entry.top_token_ids) == num_asked:
        return entry
    return TokenLogprobs(entry.chosen, entry.top_token_ids[:num_asked], entry.top_logprobs[:num_asked])
