"""Outputs of a request: the events of a stream, and the RequestOutput that they add up to.

LLM, Client and AsyncClient return the same types. The names and fields are vLLM's, with `usage` and `timings` added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import eq
from typing import Any, TypeVar, overload

from ....proto.codec import FloatArray
from ....proto.step import Logprobs
from ....proto.stream import Timings
from ..chat_format.deltas import AssistantMessage, ChatDelta, collect_message


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability at one position, before temperature and truncation.

    Attributes:
        rank: place in the vocabulary by likelihood; 1 for the most likely token.
        decoded_token: the token's text; None in outputs of Client and AsyncClient, since the server does not send it.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# token id |-> Logprob, first the token at the position, then the most likely tokens in the order of their ranks.
PositionLogprobs = dict[int, Logprob]
EntryT = TypeVar("EntryT", bound=PositionLogprobs | None)


class _Entries(Sequence[EntryT]):
    """Log-probabilities of consecutive positions, equal to a list of the same ones."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __repr__(self) -> str:
        return repr(list(self))


class ScoredTokens(_Entries[PositionLogprobs]):
    """Log-probabilities of consecutive tokens of a prompt. The entry of a position is made when it is read.

    In the arrays a log-probability takes 8 bytes, as a Logprob in a dict 230.

    Args:
        scores: one row per token.
        num_top: most likely tokens that the request asked for; others of its step may have asked for more.
        decode: see `position_logprobs`.
    """

    def __init__(
        self, token_ids: list[int], scores: Logprobs, num_top: int, decode: Callable[[int], str] | None
    ) -> None:
        self._token_ids = token_ids
        self._scores = scores
        self._num_top = num_top
        self._decode = decode

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[PositionLogprobs]:
        scores, num_top = self._scores, self._num_top
        top = scores.top_ids[:, :num_top].tolist(), scores.top[:, :num_top].tolist()
        for row in zip(self._token_ids, scores.chosen.tolist(), scores.ranks.tolist(), *top, strict=True):
            yield position_logprobs(*row, self._decode)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> ScoredTokens: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | ScoredTokens:
        scores = self._scores
        if isinstance(index, slice):
            return ScoredTokens(self._token_ids[index], scores.rows(index), self._num_top, self._decode)
        return position_logprobs(
            self._token_ids[index],
            scores.chosen[index].item(),
            scores.ranks[index].item(),
            scores.top_ids[index, : self._num_top].tolist(),
            scores.top[index, : self._num_top].tolist(),
            self._decode,
        )


class PromptScores(_Entries[PositionLogprobs | None]):
    """Log-probabilities of a prompt, None for its first token, in parts as they came."""

    def __init__(self) -> None:
        self._parts: list[Sequence[PositionLogprobs | None]] = [[None]]

    def add(self, part: Sequence[PositionLogprobs]) -> None:
        """Append the next positions."""
        self._parts.append(part)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[PositionLogprobs | None]:
        return chain.from_iterable(self._parts)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | list[PositionLogprobs | None] | None:
        positions = range(len(self))[index]
        if isinstance(positions, range):
            return [self[position] for position in positions]
        for part in self._parts:
            if positions < len(part):
                return part[positions]
            positions -= len(part)
        raise AssertionError("the position is in one of the parts")


@dataclass(frozen=True, slots=True)
class Usage:
    """Number of tokens of a request.

    Attributes:
        cached_tokens: prompt tokens whose KV was found in the prefix cache.
        reasoning_tokens: tokens of a chat's completions that are reasoning.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """First event of a stream: the request was accepted."""

    request_id: str
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobsDelta:
    """Log-probabilities of consecutive tokens of the prompt. Sent in the order of the prompt.

    Attributes:
        start: position in the prompt of the first of them; the token at position 0 has no log-probability.
        token_ids: the tokens of the prompt from `start` on.
        logprobs: one entry per token of `token_ids`.
    """

    start: int
    token_ids: list[int]
    logprobs: Sequence[PositionLogprobs]


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """New tokens and text of one completion.

    Attributes:
        index: index of the completion in `RequestOutput.outputs`.
        text: may be empty, since a token can end inside a character or inside the beginning of a stop string.
        logprobs: one entry per token of `token_ids`; empty unless requested.
        sequence_number: number of the delta within its stream, from 1.
        chat: what the delta adds to the message of a chat; None for other prompts.
        is_last: the completion has no further delta.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    sequence_number: int = 0
    chat: tuple[ChatDelta, ...] | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class CompletionFinished:
    """Last event of one completion. The attributes are those of CompletionOutput."""

    index: int
    finish_reason: str
    stop_reason: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    cumulative_logprob: float | None = None
    score: float | None = None
    weights_version: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PooledVector:
    """The vector of a pooled request; its CompletionFinished follows.

    Attributes:
        values: [dimensions or labels] float32.
    """

    values: FloatArray


# Events of a stream after RequestStarted.
OutputEvent = PromptLogprobsDelta | CompletionDelta | PooledVector | CompletionFinished
StreamEvent = RequestStarted | OutputEvent


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt. Equality ignores `usage`, `timings` and `message`.

    Attributes:
        text: as the model wrote it, in a chat with its reasoning and tool calls.
        finish_reason: ``stop`` or ``length``, in a chat also ``tool_calls``; None in a part of an output.
        stop_reason: the stop string or stop token that ended the completion; None if the model's end of sequence or
            the length did.
        logprobs: for each token, token id |-> Logprob of that token and of the most likely ones; None unless
            requested.
        cumulative_logprob: sum of the tokens' log-probabilities; None without `logprobs` and `best_of`.
        score: beam search: the summed log-probability over the length to the power of `length_penalty`; else None.
        usage: prompt tokens, and the tokens of this completion.
        message: in a chat, the completion's reasoning, content and tool calls; else None.
        weights_version: version of the weights that sampled the last token; empty for the first weights.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: Sequence[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    usage: Usage = field(default_factory=Usage, compare=False)
    timings: Timings = field(default_factory=Timings, compare=False)
    message: AssistantMessage | None = field(default=None, compare=False)
    weights_version: str = field(default="", compare=False)

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request, named as in vLLM, in seconds since 1970.

    Attributes:
        arrival_time: when the request was made.
        scheduled_ts: when its prompt was first computed.
        first_token_ts: when the first token of any completion was sampled.
        last_token_ts: when the last token of the last completion was sampled.
        num_generation_tokens: tokens of all completions.
    """

    arrival_time: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    num_generation_tokens: int

    @property
    def queued_ts(self) -> float:
        """Time at which the request entered the queue, which is its arrival."""
        return self.arrival_time

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token_ts - self.arrival_time


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        model: name under which the model is served.
        prompt: the prompt's text, of a chat as the template wrote it; None if token ids were sent, and for chats in
            outputs of Client and AsyncClient.
        prompt_token_ids: the tokens of the prompt; in outputs of Client and AsyncClient None unless the prompt was
            sent as token ids, since the server does not return its tokenization.
        outputs: the completions by index; ranked from best to worst with `best_of` and beam search.
        prompt_logprobs: for each token of the prompt, token id |-> Logprob of that token and of the most likely ones;
            None for the first token, and None as a whole unless requested.
        arrival_time: seconds since 1970 when the request was made; None in outputs of Client and AsyncClient.
        lora_request: the adapter that the request named to LLM; None otherwise.
        finished: whether all completions have ended, as they have but in parts of outputs of `AsyncLLMEngine`.
    """

    request_id: str
    model: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    arrival_time: float | None = field(default=None, compare=False)
    lora_request: Any = field(default=None, compare=False)
    finished: bool = True

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in the prefix cache."""
        return self.usage.cached_tokens

    @property
    def metrics(self) -> RequestMetrics | None:
        """Times of the request; None without `arrival_time`."""
        if self.arrival_time is None:
            return None
        timings = [output.timings for output in self.outputs]
        times = [(each.queued_s, each.prefill_s, each.decode_s) for each in timings]
        queued_s = min(queued for queued, _, _ in times)
        return RequestMetrics(
            self.arrival_time,
            self.arrival_time + queued_s,
            self.arrival_time + min(queued + prefill for queued, prefill, _ in times),
            self.arrival_time + max(map(sum, times)),
            self.usage.completion_tokens,
        )

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt, counted once, and of all completions in `outputs`."""
        first = self.outputs[0].usage
        return Usage(
            first.prompt_tokens,
            sum(output.usage.completion_tokens for output in self.outputs),
            first.cached_tokens,
            sum(output.usage.reasoning_tokens for output in self.outputs),
        )


def position_logprobs(
    token_id: int,
    logprob: float,
    rank: int,
    top_token_ids: Sequence[int],
    top_logprobs: Sequence[float],
    decode: Callable[[int], str] | None = None,
) -> PositionLogprobs:
    """Return the log-probabilities of one position by token id.

    Args:
        token_id: the token at the position.
        logprob: its log-probability.
        rank: its rank in the vocabulary. Where it is as likely as one of the most likely tokens but not one of them,
            it ranks behind them.
        top_token_ids: the most likely tokens, in descending order.
        top_logprobs: one per token of `top_token_ids`.
        decode: returns a token's text; None leaves `decoded_token` unset.
    """
    behind_top = max(rank, len(top_token_ids) + 1)
    entries = {token_id: Logprob(logprob, behind_top, None if decode is None else decode(token_id))}
    for top_rank, (top_id, top_logprob) in enumerate(zip(top_token_ids, top_logprobs, strict=True), start=1):
        entries[top_id] = Logprob(top_logprob, top_rank, None if decode is None else decode(top_id))
    return entries


def most_likely(entry: PositionLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """Return the `num_top` most likely tokens of a position, best first, of which the position's own may be none."""
    top = [(token_id, logprob) for token_id, logprob in entry.items() if logprob.rank <= num_top]
    return sorted(top, key=lambda item: item[1].rank)


def collect_output(
    events: Iterable[StreamEvent],
    *,
    prompt: str | None,
    prompt_token_ids: list[int] | None,
    with_prompt_logprobs: bool,
    arrival_time: float | None = None,
) -> RequestOutput:
    """Return the output that all events of a request's stream add up to.

    Args:
        prompt, prompt_token_ids, arrival_time: fields of the RequestOutput, which the events do not contain.
        with_prompt_logprobs: whether the request asked for `prompt_logprobs`.
    """
    deltas: dict[int, list[CompletionDelta]] = defaultdict(list)
    finished: dict[int, CompletionFinished] = {}
    of_prompt = PromptScores()
    started = None
    for event in events:
        if isinstance(event, CompletionDelta):
            deltas[event.index].append(event)
        elif isinstance(event, CompletionFinished):
            finished[event.index] = event
        elif isinstance(event, PromptLogprobsDelta):
            of_prompt.add(event.logprobs)
        elif isinstance(event, RequestStarted):
            started = event
    assert started is not None, "the stream has no RequestStarted"
    return RequestOutput(
        request_id=started.request_id,
        model=started.model,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[_completion(deltas[index], finished[index]) for index in sorted(finished)],
        prompt_logprobs=of_prompt if with_prompt_logprobs else None,
        arrival_time=arrival_time,
    )


def _completion(deltas: list[CompletionDelta], finished: CompletionFinished) -> CompletionOutput:
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    of_chat = [delta.chat for delta in deltas if delta.chat is not None]
    end = {name: getattr(finished, name) for name in CompletionFinished.__dataclass_fields__}
    return CompletionOutput(
        **end,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=logprobs or None,
        message=collect_message(chain.from_iterable(of_chat)) if of_chat else None,
    )
