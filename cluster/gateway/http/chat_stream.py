"""ChatStream: the chunks of a streamed /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...text.chat_format.deltas import ChatDelta, ContentDelta, ReasoningDelta, ToolCallStart
from ...text.requests.outputs import CompletionDelta, CompletionFinished, StreamEvent, Usage
from ..generation.generation import Generation
from .choice_logprobs import chat_logprobs
from .completion_stream import DONE
from .json_text import json_text, quoted
from .response_head import ResponseHead
from .schema.chat_completion import ChatCompletionRequest
from .stream_position import StreamPosition
from .usage_json import ending_json, timings_json, usage_json


class ChatStream:
    """Writes the events of one conversation's completions as chunks, from prepared text as CompletionStream.

    Args:
        position: of the client before the events.
    """

    def __init__(
        self,
        head: ResponseHead,
        body: ChatCompletionRequest,
        generation: Generation,
        position: StreamPosition,
    ) -> None:
        self._body = body
        self._generation = generation
        self._start = (
            f'data: {{"id":{quoted(head.id)},"object":"chat.completion.chunk","created":{head.created},'
            f'"model":{quoted(generation.model_name)},'
        )
        num_choices = generation.request.sampling.n
        self._starts = [
            f'{self._start}"choices":[{{"index":{index},"delta":{{' for index in range(num_choices)
        ]
        self._is_begun = [False] * num_choices
        self._num_tokens = [0] * num_choices
        for index, output in position.resume_position.outputs.items():
            self._is_begun[index], self._num_tokens[index] = True, output.num_tokens
        self._num_reasoning_tokens = position.reasoning_tokens
        self._num_prompt_tokens = len(generation.request.prompt_token_ids)
        self._num_cached_tokens = position.cached_tokens
        self._null_usage = ',"usage":null' if body.includes_usage else ""
        self._is_plain = not (body.logprobs or body.return_token_ids or body.has_continuous_usage)
        self._plain_end = f'}},"logprobs":null,"finish_reason":null}}]{self._null_usage}}}\n\n'

    def event(self, event: StreamEvent) -> bytes:
        """Return the chunks of an event; empty if there is nothing to send."""
        if self._body.resumable and isinstance(event, CompletionDelta | CompletionFinished):
            return self._whole(event)
        if isinstance(event, CompletionDelta):
            begun = b"" if self._is_begun[event.index] else self._begin(event.index)
            if self._is_plain:
                return begun + self._plain(event)
            return begun + self._full(event)
        if isinstance(event, CompletionFinished):
            begun = b"" if self._is_begun[event.index] else self._begin(event.index)
            return begun + self._finished(event)
        return b""

    def end(self) -> bytes:
        """Return the chunks after all events."""
        if not self._body.includes_usage:
            return DONE
        return f'{self._start}"choices":[],"usage":{self._usage()}}}\n\n'.encode() + DONE

    def _begin(self, index: int) -> bytes:
        self._is_begun[index] = True
        return (
            f'{self._starts[index]}"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]'
            f"{self._prompt_member()}{self._null_usage}}}\n\n"
        ).encode()

    def _prompt_member(self) -> str:
        if not self._body.return_token_ids:
            return ""
        return f',"prompt_token_ids":{json_text(self._generation.request.prompt_token_ids.tolist())}'

    def _whole(self, event: CompletionDelta | CompletionFinished) -> bytes:
        """Return the event as one chunk at most: the client of a resumable stream has it whole or not at all."""
        is_first = not self._is_begun[event.index]
        self._is_begun[event.index] = True
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        if isinstance(event, CompletionFinished):
            return self._finished(event, json_text(delta)[1:-1])
        delta |= merged_delta(event.chat or ())
        if self._is_plain and not delta:
            return b""
        others = json_text(self._others(event))[1:-1]
        prompt = self._prompt_member() if is_first else ""
        members = json_text(delta)[1:-1]
        start = self._starts[event.index]
        return f"{start}{members}}},{others}}}]{prompt}{self._usage_member()}}}\n\n".encode()

    def _plain(self, event: CompletionDelta) -> bytes:
        start = self._starts[event.index]
        parts = event.chat or ()
        return "".join([start + delta_members(part) + self._plain_end for part in parts]).encode()

    def _full(self, event: CompletionDelta) -> bytes:
        """Return chunks with log-probabilities, token ids and usage; those of all tokens are in the first chunk."""
        others = self._others(event)
        chunks = []
        for part in event.chat or (None,):
            delta = "" if part is None else delta_members(part)
            chunks.append(
                f"{self._starts[event.index]}{delta}}},{json_text(others)[1:-1]}}}]{self._usage_member()}}}\n\n"
            )
            others = {"logprobs": None, "finish_reason": None}
        return "".join(chunks).encode()

    def _others(self, event: CompletionDelta) -> dict[str, Any]:
        """Return the members beside the delta, and count the tokens."""
        self._num_tokens[event.index] += len(event.token_ids)
        others: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if self._body.logprobs:
            tokenizer = self._generation.model.tokenizer
            content = chat_logprobs(
                tokenizer, event.token_ids, event.logprobs, self._generation.request.sampling.logprobs or 0
            )
            others["logprobs"] = {"content": content, "refusal": None}
        if self._body.return_token_ids:
            others["token_ids"] = event.token_ids
        return others

    def _finished(self, event: CompletionFinished, delta: str = "") -> bytes:
        self._num_tokens[event.index] = event.usage.completion_tokens
        self._num_reasoning_tokens += event.usage.reasoning_tokens
        self._num_cached_tokens = event.usage.cached_tokens
        stop = json_text(ending_json(event))
        timings = json_text(timings_json(event.timings))
        return (
            f'{self._starts[event.index]}{delta}}},"logprobs":null,{stop[1:-1]}}}],"timings":{timings}'
            f"{self._usage_member()}}}\n\n"
        ).encode()

    def _usage_member(self) -> str:
        return f',"usage":{self._usage()}' if self._body.has_continuous_usage else self._null_usage

    def _usage(self) -> str:
        usage = Usage(
            self._num_prompt_tokens,
            sum(self._num_tokens),
            self._num_cached_tokens,
            self._num_reasoning_tokens,
        )
        return json_text(usage_json(usage))


def merged_delta(parts: Iterable[ChatDelta]) -> dict[str, Any]:
    """Return ``choices[].delta`` with all parts."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, ContentDelta):
            delta["content"] = delta.get("content", "") + part.text
        elif isinstance(part, ReasoningDelta):
            delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
        else:
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            if isinstance(part, ToolCallStart):
                call |= {"id": part.id, "type": "function"}
                call["function"]["name"] = part.name
            else:
                call["function"]["arguments"] += part.text
    return delta | ({"tool_calls": list(calls.values())} if calls else {})


def delta_members(delta: ChatDelta) -> str:
    """Return the members of ``choices[].delta``."""
    if isinstance(delta, ContentDelta):
        return f'"content":{quoted(delta.text)}'
    if isinstance(delta, ReasoningDelta):
        return f'"reasoning_content":{quoted(delta.text)}'
    if isinstance(delta, ToolCallStart):
        return (
            f'"tool_calls":[{{"index":{delta.index},"id":{quoted(delta.id)},"type":"function",'
            f'"function":{{"name":{quoted(delta.name)},"arguments":""}}}}]'
        )
    return f'"tool_calls":[{{"index":{delta.index},"function":{{"arguments":{quoted(delta.text)}}}}}]'
