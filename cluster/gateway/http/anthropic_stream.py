"""Messages in Anthropic's form: whole, and as the events of a stream."""

from __future__ import annotations

import json
from typing import Any

from ....proto.errors import QuireError
from ...text.chat_format.deltas import (
    AssistantMessage,
    ChatDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from ...text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    CompletionOutput,
    RequestOutput,
    StreamEvent,
    Usage,
)
from ..generation.generation import Generation
from .errors import anthropic_error
from .json_text import json_text, quoted
from .response_head import ResponseHead
from .usage_json import version_json

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "repetition": "end_turn",
}


def message_json(head: ResponseHead, output: RequestOutput) -> dict[str, Any]:
    """Return a whole message."""
    completion = output.outputs[0]
    stop = _stop(completion)
    message = _empty_message(head.id, output.model) | stop | {"usage": _usage(output.usage)}
    return message | {"content": _blocks(completion.message or AssistantMessage())}


def error_event(error: QuireError) -> bytes:
    """Return the last event of a stream that failed."""
    return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"


class AnthropicStream:
    """Writes the events of one conversation's completion: blocks of thinking, text and tool use."""

    def __init__(self, head: ResponseHead, generation: Generation) -> None:
        self._head = head
        self._generation = generation
        self._is_begun = False
        self._index = -1  # of the open block
        self._kind: type[ChatDelta] | None = None  # what the open block holds

    def event(self, event: StreamEvent) -> str:
        """Return the events of a stream's event; empty if there is nothing to send."""
        if isinstance(event, CompletionDelta):
            return self._begin() + "".join([self._delta(part) for part in event.chat or ()])
        if isinstance(event, CompletionFinished):
            return self._begin() + self._end_block() + self._finished(event)
        return ""

    def _begin(self) -> str:
        if self._is_begun:
            return ""
        self._is_begun = True
        usage = _usage(Usage(len(self._generation.request.prompt_token_ids)))
        message = _empty_message(self._head.id, self._generation.model_name) | {"usage": usage}
        return _event("message_start", message=message) + _event("ping")

    def _delta(self, delta: ChatDelta) -> str:
        if isinstance(delta, ToolCallStart):
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            return self._start_block(ToolCallArguments, block)
        started = ""
        if isinstance(delta, ToolCallArguments):
            member = f'"type":"input_json_delta","partial_json":{quoted(delta.text)}'
        elif isinstance(delta, ContentDelta):
            if self._kind is not ContentDelta:
                started = self._start_block(ContentDelta, {"type": "text", "text": ""})
            member = f'"type":"text_delta","text":{quoted(delta.text)}'
        else:
            if self._kind is not ReasoningDelta:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                started = self._start_block(ReasoningDelta, block)
            member = f'"type":"thinking_delta","thinking":{quoted(delta.text)}'
        return (
            f'{started}event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{{member}}}}}\n\n'
        )

    def _start_block(self, kind: type[ChatDelta], block: dict[str, Any]) -> str:
        ended = self._end_block()
        self._index += 1
        self._kind = kind
        return ended + _event("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> str:
        if self._kind is None:
            return ""
        self._kind = None
        return _event("content_block_stop", index=self._index)

    def _finished(self, event: CompletionFinished) -> str:
        delta = _event("message_delta", delta=_stop(event), usage=_usage(event.usage))
        return delta + _event("message_stop")


def _event(kind: str, **members: Any) -> str:
    return f"event: {kind}\ndata: {json_text({'type': kind, **members})}\n\n"


def _empty_message(id: str, model: str) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop(completion: CompletionOutput | CompletionFinished) -> dict[str, Any]:
    version = version_json(completion)
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason, **version}
    return {"stop_reason": _STOP_REASONS[completion.finish_reason], "stop_sequence": None, **version}


def _usage(usage: Usage) -> dict[str, int]:
    """Return Anthropic's usage, whose input tokens are those that no cache held."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _blocks(message: AssistantMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content is not None:
        blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if message.content is not None:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _parsed(call.arguments)}
        )
    return blocks


def _parsed(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; text that is not a JSON object as the member `arguments`, for the tool to reject."""
    try:
        parsed = json.loads(arguments or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
