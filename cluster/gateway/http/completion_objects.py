"""OpenAI's completions and chat completions, streamed or whole: what both have, with usage and log-probabilities.

A field that is UNSET is not sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ....proto.stream import Timings
from ...text.requests.outputs import (
    CompletionFinished,
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    Usage,
    most_likely,
)
from ...text.requests.tokenizer import Tokenizer
from ..generation.generation import Generation
from .json_bodies import JsonItems, ResponseHead, json_bytes
from .schema.sampling_fields import SamplingFields
from .stream_position import StreamPosition

# Stands for minus infinity, which JSON lacks; as OpenAI's API.
LEAST = -9999.0

DONE = b"data: [DONE]\n\n"


class Chunk(Struct):
    """A part of a stream. The chunk that ends a choice has the timings."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET
    usage: dict[str, Any] | UnsetType | None = UNSET

    def event(self, encode: Callable[[Any], bytes] = json_bytes) -> bytes:
        """Return the chunk as an event of the stream."""
        return b"data: %b\n\n" % encode(self)


class ChunkStream:
    """Writer of the chunks of a stream: their common fields, and the usage.

    Args:
        position: the client's position before the events; with several prompts it is the beginning.
    """

    def __init__(
        self,
        kind: str,
        head: ResponseHead,
        body: SamplingFields,
        generations: Sequence[Generation],
        position: StreamPosition,
    ) -> None:
        self._body = body
        self._new_chunk = partial(Chunk, head.id, kind, head.created, generations[0].model_name)
        self._num_tokens = [0] * (generations[0].request.sampling.n * len(generations))
        for index, output in position.resume_position.outputs.items():
            self._num_tokens[index] = output.num_tokens
        self._null_usage = None if body.includes_usage else UNSET

    def end(self) -> bytes:
        """Return the chunks after all events."""
        if not self._body.includes_usage:
            return DONE
        return self._new_chunk([], usage=usage_json(self._usage())).event() + DONE

    def _usage(self) -> Usage:
        """Return the usage so far."""
        raise NotImplementedError

    def _usage_so_far(self) -> dict[str, Any] | UnsetType | None:
        """Return the usage of a chunk that is not the last."""
        return usage_json(self._usage()) if self._body.has_continuous_usage else self._null_usage


class Completion(Struct):
    """A whole response."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: dict[str, Any]
    timings: dict[str, float]
    prompt_logprobs: JsonItems | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Choice(Struct):
    """One of the choices: text, in a chat a message, and in the chunks of a chat what is new of it."""

    index: int
    message: Message | UnsetType = UNSET
    delta: Message | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    weights_version: str | UnsetType = UNSET
    prompt_logprobs: JsonItems | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Message(Struct):
    """A message of the assistant, whose reasoning has two names: vLLM's, and that of most other servers."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ToolCall(Struct, kw_only=True):
    """A call of a function, of which a chunk after the first one has only new arguments."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class Function(Struct):
    """The function that is called."""

    name: str | UnsetType = UNSET
    arguments: str = ""


def ending(completion: CompletionOutput | CompletionFinished) -> dict[str, Any]:
    """Return the members of a choice that has ended."""
    return {
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        **version_json(completion),
    }


def version_json(completion: CompletionOutput | CompletionFinished) -> dict[str, str]:
    """Return the member `weights_version`; none for the weights that the server started with."""
    return {"weights_version": completion.weights_version} if completion.weights_version else {}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def timings_json(timings: Timings) -> dict[str, float]:
    """Return the seconds that a completion spent in each stage."""
    return {name: round(value, 6) for name, value in asdict(timings).items()}


def total_usage(usages: Iterable[Usage]) -> Usage:
    """Return the sum over prompts."""
    each = list(usages)
    return Usage(
        sum(usage.prompt_tokens for usage in each),
        sum(usage.completion_tokens for usage in each),
        sum(usage.cached_tokens for usage in each),
        sum(usage.reasoning_tokens for usage in each),
    )


def json_logprob(logprob: float) -> float:
    return max(logprob, LEAST) if math.isfinite(logprob) else LEAST


class CompletionLogprobs:
    """Log-probabilities of one completion, with the offset of each token in the text.

    Args:
        num_top: most likely tokens that were asked for.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0

    def of_tokens(self, token_ids: list[int], entries: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """Return the next tokens' part; an entry is None for the first token of a prompt."""
        texts = [self._tokenizer.token_text(token_id) for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            chosen.append(None if entry is None else json_logprob(entry[token_id].logprob))
            top.append(None if entry is None else self._top(token_id, entry))
        return {
            "tokens": texts,
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, entry: PositionLogprobs) -> dict[str, float]:
        """Return the most likely tokens, and the sampled one if it is not among them."""
        top: dict[str, float] = {}
        for each, logprob in [*most_likely(entry, self._num_top), (token_id, entry[token_id])]:
            top.setdefault(self._tokenizer.token_text(each), json_logprob(logprob.logprob))
        return top


def num_logprobs(output: RequestOutput) -> int:
    """Return about the number of log-probabilities; each completion may repeat those of the prompt."""
    of_prompt = num_of_entries(output.prompt_logprobs or ())
    return sum(of_prompt + num_of_entries(completion.logprobs or ()) for completion in output.outputs)


def num_of_entries(entries: Sequence[PositionLogprobs | None]) -> int:
    """Return about the number of log-probabilities of positions, all of which have as many as the last one."""
    return len(entries) * len(entries[-1] or ()) if entries else 0


def join_logprobs(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the parts of one completion as a whole; None if there are none."""
    return {name: [each for part in parts for each in part[name]] for name in parts[0]} if parts else None


class TokenLogprob(Struct):
    """A token of a chat completion, with the most likely ones at its position, or one of these."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob] | UnsetType = UNSET

    @staticmethod
    def of(
        tokenizer: Tokenizer,
        token_id: int,
        logprob: Logprob,
        top: list[TokenLogprob] | UnsetType = UNSET,
    ) -> TokenLogprob:
        text = tokenizer.token_text(token_id)
        return TokenLogprob(text, json_logprob(logprob.logprob), list(text.encode()), top)


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: list[int], entries: Sequence[PositionLogprobs], num_top: int
) -> list[TokenLogprob]:
    """Return the entries of ``logprobs.content``."""
    return [
        TokenLogprob.of(
            tokenizer,
            token_id,
            entry[token_id],
            [TokenLogprob.of(tokenizer, *each) for each in most_likely(entry, num_top)],
        )
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


def prompt_logprobs_json(tokenizer: Tokenizer, entries: Sequence[PositionLogprobs | None]) -> JsonItems:
    """Return vLLM's ``prompt_logprobs``: token id |-> log-probability, rank and text, None for the first token."""

    def item(entry: PositionLogprobs | None) -> dict[str, Any] | None:
        if entry is None:
            return None
        return {
            str(token_id): {
                "logprob": json_logprob(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": tokenizer.token_text(token_id),
            }
            for token_id, logprob in entry.items()
        }

    return JsonItems(item, entries)
