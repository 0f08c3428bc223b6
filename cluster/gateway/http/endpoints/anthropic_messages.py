"""/v1/messages and /v1/messages/count_tokens: conversations as Anthropic's API has them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from .....proto.errors import QuireError
from .....proto.sampling import SamplingParams
from ....text.chat_format.deltas import (
    AssistantMessage,
    ChatDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from ....text.requests.outputs import (
    CompletionDelta,
    CompletionFinished,
    CompletionOutput,
    RequestOutput,
    StreamEvent,
    Usage,
)
from ...admin.services import GatewayServices
from ...generation.generation import Generation, GenerationCall
from ..calls import (
    preparing,
    prompt_token_ids,
    renamed_fields,
    run_to_end,
    with_context,
)
from ..completion_objects import version_json
from ..errors import ANTHROPIC_ERRORS, WHOLE_OR_STREAM, anthropic_error
from ..event_stream import EventStream
from ..json_bodies import BodyRoute, ResponseHead, TextTemplate, json_bytes
from ..schema.anthropic_message import CountTokensRequest, MessagesRequest

# field of quire.v1 |-> field of this endpoint
_FIELDS = {
    "sampling.stop": "stop_sequences",
    "sampling.thinking_token_budget": "thinking.budget_tokens",
    "prompt": "messages",
    "chat": "messages",
    "chat.template_options": "chat_template_kwargs",
}

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "repetition": "end_turn",
}


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], responses=ANTHROPIC_ERRORS, route_class=BodyRoute)

    @router.post("/v1/messages", summary="Continue a conversation", responses=WHOLE_OR_STREAM)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        head = ResponseHead.new("msg_")
        with preparing(services, _FIELDS):
            call = GenerationCall(
                body.chat(),
                body.sampling(),
                model=body.model or "",
                priority=-body.priority,  # in quire.v1, higher runs first
                cache_salt=body.cache_salt,
            )
            call = with_context(call, request, services)
        if body.stream:
            return EventStream(_stream(services, call, head), error_event, head.headers)
        _, (output,) = await run_to_end(services, [call], _FIELDS, request)
        return head.response(message_json(head, output))

    @router.post("/v1/messages/count_tokens", summary="Count the tokens of a conversation")
    async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, int]:
        with preparing(services, _FIELDS):
            call = GenerationCall(body.chat(), SamplingParams(), model=body.model or "")
            call = with_context(call, request, services)
            return {"input_tokens": len(await prompt_token_ids(services, call))}

    return router


async def _stream(
    services: GatewayServices, call: GenerationCall, head: ResponseHead
) -> AsyncGenerator[bytes, None]:
    with renamed_fields(_FIELDS):
        async with services.generation.run(call) as generation:
            stream = AnthropicStream(head, generation)
            async for event in generation.events:
                if chunk := stream.event(event):
                    yield chunk


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
        self._template: TextTemplate  # of the open block's next event

    def event(self, event: StreamEvent) -> bytes:
        """Return the events of a stream's event; empty if there is nothing to send."""
        if isinstance(event, CompletionDelta):
            return self._begin() + b"".join([self._delta(part) for part in event.chat or ()])
        if isinstance(event, CompletionFinished):
            return self._begin() + self._end_block() + self._finished(event)
        return b""

    def _begin(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        usage = _usage(Usage(len(self._generation.request.prompt_token_ids)))
        message = _empty_message(self._head.id, self._generation.model_name) | {"usage": usage}
        return _event("message_start", message=message) + _event("ping")

    def _delta(self, delta: ChatDelta) -> bytes:
        if isinstance(delta, ToolCallStart):
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            return self._start_block(ToolCallArguments, block, "input_json_delta", "partial_json")
        started = b""
        if isinstance(delta, ContentDelta) and self._kind is not ContentDelta:
            started = self._start_block(ContentDelta, {"type": "text", "text": ""}, "text_delta", "text")
        elif isinstance(delta, ReasoningDelta) and self._kind is not ReasoningDelta:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            started = self._start_block(ReasoningDelta, block, "thinking_delta", "thinking")
        return started + self._template.with_text(delta.text)

    def _start_block(
        self, kind: type[ChatDelta], block: dict[str, Any], delta_type: str, member: str
    ) -> bytes:
        """Return the events that start a block. `member` is the one of its deltas that has the text."""
        ended = self._end_block()
        self._index += 1
        self._kind = kind
        self._template = TextTemplate(
            lambda text: _event(
                "content_block_delta", index=self._index, delta={"type": delta_type, member: text}
            )
        )
        return ended + _event("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> bytes:
        if self._kind is None:
            return b""
        # Clients send a block of thinking back with its signature, which nothing here checks.
        signature = {"type": "signature_delta", "signature": ""}
        signed = _event("content_block_delta", index=self._index, delta=signature)
        ended = signed if self._kind is ReasoningDelta else b""
        self._kind = None
        return ended + _event("content_block_stop", index=self._index)

    def _finished(self, event: CompletionFinished) -> bytes:
        delta = _event("message_delta", delta=_stop(event), usage=_usage(event.usage))
        return delta + _event("message_stop")


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_bytes({"type": kind, **members}))


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
    return {"stop_reason": _STOP_REASONS[completion.finish_reason or ""], "stop_sequence": None, **version}


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
