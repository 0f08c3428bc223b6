"""What a request is answered with, as a client sees it: events as they come, or one completion at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...proto.stream import FinishReason, Timings


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position, by the model itself, before temperature and cuts.

    Attributes:
        chosen: of the token that is there: that was sampled, or that the prompt has.
        top_token_ids: the likeliest tokens, likeliest first, as many as were asked for.
        top_logprobs: theirs.
    """

    chosen: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request took.

    Attributes:
        cached_tokens: of the prompt's, those whose KV was found in the prefix cache.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    request_id: str
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of tokens of the prompt, which come in order.

    Attributes:
        start: the place of the first of them; the prompt's first token, at place 0, has none.
    """

    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer.

    Attributes:
        text: may be empty: a token can end inside a character, or inside what may become a stop string.
        sequence_number: counts the deltas of a stream from 1.
        index: which of the request's outputs.
        logprobs: one for each of token_ids where asked for, otherwise empty.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    sequence_number: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer.

    Attributes:
        stop_reason: the stop string or stop token that ended it; None for the model's own end of sequence,
            or for an answer that ended by its length.
        cumulative_logprob: sum of its tokens' log-probabilities; known with logprobs or best_of, else None.
        score: beam search: what it was ranked by, the summed log-probability over the length to the power of
            the length penalty; else None.
    """

    reason: FinishReason
    stop_reason: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    index: int = 0
    cumulative_logprob: float | None = None
    score: float | None = None


Event = Started | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class Output:
    """One complete answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished

    @property
    def index(self) -> int:
        return self.finished.index

    @property
    def finish_reason(self) -> FinishReason:
        return self.finished.reason

    @property
    def cumulative_logprob(self) -> float | None:
        return self.finished.cumulative_logprob

    @property
    def score(self) -> float | None:
        return self.finished.score


@dataclass(frozen=True, slots=True)
class Completion:
    """A request's outputs, by index. The properties are those of the first, mostly the only one.

    Attributes:
        prompt_logprobs: one for each token of the prompt, None for the first; None as a whole unless asked for.
    """

    request_id: str
    model: str
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finished.reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].finished.stop_reason

    @property
    def usage(self) -> Usage:
        return self.outputs[0].finished.usage

    @property
    def timings(self) -> Timings:
        return self.outputs[0].finished.timings


def collect(events: Iterable[Event]) -> tuple[Output, ...]:
    """The outputs, by index, that a request's events amount to."""
    deltas: dict[int, list[Delta]] = defaultdict(list)
    ends: dict[int, Finished] = {}
    for event in events:
        if isinstance(event, Delta):
            deltas[event.index].append(event)
        elif isinstance(event, Finished):
            ends[event.index] = event
    return tuple(_output(deltas[index], ends[index]) for index in sorted(ends))


def collect_prompt_logprobs(events: Iterable[Event]) -> tuple[TokenLogprobs | None, ...]:
    """One for each token of the prompt, of the events of a request that asked for them."""
    parts = (event.logprobs for event in events if isinstance(event, PromptLogprobs))
    return (None, *(entry for part in parts for entry in part))


def _output(deltas: list[Delta], finished: Finished) -> Output:
    return Output(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finished=finished,
    )
