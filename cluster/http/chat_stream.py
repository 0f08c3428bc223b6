"""ChatStream: the chunks of a streamed /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from ..chat_format.deltas import ChatDelta, ContentDelta, ReasoningDelta, ToolCallStart
from ..gateway.generation import Generation
from ..requests.outputs import CompletionDelta, CompletionFinished, StreamEvent, Usage
from .choice_logprobs import chat_logprobs
from .completion_stream import DONE
from .json_text import json_text, quoted
from .response_head import ResponseHead
from .schema.chat_completion import ChatCompletionRequest
from .usage_json import ending_json, timings_json, usage_json


class ChatStream:
    """Writes the events of one conversation's completions as chunks, from prepared text as CompletionStream."""

    def __init__(self, head: ResponseHead, body: ChatCompletionRequest, generation: Generation) -> None:
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
        self._num_reasoning_tokens = 0
        self._num_prompt_tokens = len(generation.request.prompt_token_ids)
        self._num_cached_tokens = 0
        self._null_usage = ',"usage":null' if body.includes_usage else ""
        self._is_plain = not (body.logprobs or body.return_token_ids or body.has_continuous_usage)
        self._plain_end = f'}},"logprobs":null,"finish_reason":null}}]{self._null_usage}}}\n\n'

    def event(self, event: StreamEvent) -> bytes:
        """Return the chunks of an event; empty if there is nothing to send."""
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
        members = ""
        if self._body.return_token_ids:
            members = f',"prompt_token_ids":{json_text(self._generation.request.prompt_token_ids.tolist())}'
        return (
            f'{self._starts[index]}"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]'
            f"{members}{self._null_usage}}}\n\n"
        ).encode()

    def _plain(self, event: CompletionDelta) -> bytes:
        start = self._starts[event.index]
        parts = event.chat or ()
        return "".join([start + delta_members(part) + self._plain_end for part in parts]).encode()

    def _full(self, event: CompletionDelta) -> bytes:
        """Return chunks with log-probabilities, token ids and usage; those of all tokens are in the first chunk."""
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
        chunks = []
        for part in event.chat or (None,):
            delta = "" if part is None else delta_members(part)
            chunks.append(
                f"{self._starts[event.index]}{delta}}},{json_text(others)[1:-1]}}}]{self._usage_member()}}}\n\n"
            )
            others = {"logprobs": None, "finish_reason": None}
        return "".join(chunks).encode()

    def _finished(self, event: CompletionFinished) -> bytes:
        self._num_tokens[event.index] = event.usage.completion_tokens
        self._num_reasoning_tokens += event.usage.reasoning_tokens
        self._num_cached_tokens = event.usage.cached_tokens
        stop = json_text(ending_json(event))
        timings = json_text(timings_json(event.timings))
        return (
            f'{self._starts[event.index]}}},"logprobs":null,{stop[1:-1]}}}],"timings":{timings}'
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
