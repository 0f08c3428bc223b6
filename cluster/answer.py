"""Answer: one sequence's news become the events that its caller sees, the same way for the gateway and offline."""

from __future__ import annotations

from ..proto.errors import from_status
from ..proto.stream import Finish, FinishReason
from .detokenizer import Detokenizer
from .events import Delta, Finished, TokenLogprobs, Usage
from .news import News
from .requests import Request
from .tokenizer import Tokenizer


class Answer:
    """The text side of a running sequence."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._detokenizer = Detokenizer(tokenizer, request.sampling.stop)
        self._num_tokens = 0
        self._num_deltas = 0

    @property
    def is_complete(self) -> bool:
        """A stop string was found: nothing will be added, and the caller stops the sequence in the scheduler."""
        return self._detokenizer.stop_string is not None

    def take(self, news: News) -> tuple[Delta | None, Finished | None]:
        """What the news amount to.

        Raises:
            QuireError: the sequence ended with an error; this is it.
        """
        finish = news.finish
        if finish is not None and finish.reason is FinishReason.ERROR:
            raise from_status(finish.grpc_status, finish.error)
        delta = None if self.is_complete else self._delta(news)
        return delta, None if finish is None else self._finished(finish)

    def _delta(self, news: News) -> Delta | None:
        finish = news.finish
        # The token that stopped the sequence is part of the answer, but not of its text.
        num_silent = int(finish is not None and finish.reason is FinishReason.STOP and bool(news.token_ids))
        text, num_tokens = self._detokenizer.push(news.token_ids[: len(news.token_ids) - num_silent])
        if not self.is_complete:
            num_tokens += num_silent
            if finish is not None:
                text += self._detokenizer.finish()
        if not num_tokens and not text:
            return None
        self._num_tokens += num_tokens
        self._num_deltas += 1
        num_asked = self._request.sampling.logprobs or 0
        logprobs = tuple(_cut(entry, num_asked) for entry in news.logprobs[:num_tokens])
        return Delta(text, tuple(news.token_ids[:num_tokens]), logprobs, self._num_deltas)

    def _finished(self, finish: Finish) -> Finished:
        usage = Usage(len(self._request.prompt_token_ids), self._num_tokens, finish.num_cached_tokens)
        if self.is_complete:
            return Finished(FinishReason.STOP, self._detokenizer.stop_string, usage, finish.timings)
        return Finished(finish.reason, finish.stop_token_id, usage, finish.timings)


def _cut(entry: TokenLogprobs, num_asked: int) -> TokenLogprobs:
    """The entry without the likeliest tokens that only other requests of its step asked for."""
    if len(entry.top_token_ids) == num_asked:
        return entry
    return TokenLogprobs(entry.chosen, entry.top_token_ids[:num_asked], entry.top_logprobs[:num_asked])
