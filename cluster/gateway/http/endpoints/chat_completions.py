"""/v1/chat/completions: conversations in, messages out, as OpenAI's API and vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ....text.chat_format.deltas import AssistantMessage
from ....text.requests.outputs import CompletionOutput, RequestOutput
from ...admin.services import GatewayServices
from ...generation.generation import Generation, GenerationCall
from ..calls import collect_all, preparing, renamed_fields, unless_client_leaves, with_context
from ..chat_stream import ChatStream
from ..choice_logprobs import chat_logprobs, num_logprobs, prompt_logprobs_json
from ..errors import OPENAI_ERRORS, WHOLE_OR_STREAM, openai_error_event
from ..event_stream import EventStream
from ..large_request import BodyRoute
from ..large_response import response_of
from ..response_head import ResponseHead
from ..schema.chat_completion import ChatCompletionRequest
from ..stream_position import StreamPosition, chunks_of
from ..usage_json import ending_json, timings_json, usage_json


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=OPENAI_ERRORS, route_class=BodyRoute)

    @router.post("/v1/chat/completions", summary="Continue a conversation", responses=WHOLE_OR_STREAM)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        head = ResponseHead.new("chatcmpl-", body.request_id)
        with preparing(services, body.field_names):
            call = with_context(body.call(body.chat(), body.sampling()), request, services)
            position = StreamPosition.of_headers(request.headers, call)
        if body.stream:
            return EventStream(
                _stream(services, call, body, head, position), openai_error_event, head.headers
            )
        async with unless_client_leaves(request.receive):
            with renamed_fields(body.field_names):
                async with services.generation.run(call) as generation:
                    (output,) = await collect_all([generation])
        make = partial(_whole, head, body, generation, output)
        return await response_of(head, make, num_values=num_logprobs(output))

    return router


async def _stream(
    services: GatewayServices,
    call: GenerationCall,
    body: ChatCompletionRequest,
    head: ResponseHead,
    position: StreamPosition,
) -> AsyncGenerator[bytes, None]:
    with renamed_fields(body.field_names):
        async with services.generation.run(position.resumed(call)) as generation:
            stream = ChatStream(head, body, generation, position)
            async for chunk in chunks_of(generation, stream.event, position if body.resumable else None):
                yield chunk
            yield stream.end()


def _whole(
    head: ResponseHead, body: ChatCompletionRequest, generation: Generation, output: RequestOutput
) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": output.model,
        "choices": [_choice(body, generation, completion) for completion in output.outputs],
        "usage": usage_json(output.usage),
        "timings": timings_json(output.outputs[0].timings),
    }
    if output.prompt_logprobs is not None:
        whole["prompt_logprobs"] = prompt_logprobs_json(generation.model.tokenizer, output.prompt_logprobs)
    if body.return_token_ids:
        whole["prompt_token_ids"] = output.prompt_token_ids
    return whole


def _choice(
    body: ChatCompletionRequest, generation: Generation, completion: CompletionOutput
) -> dict[str, Any]:
    logprobs = None
    if body.logprobs:
        num_top = generation.request.sampling.logprobs or 0
        entries = completion.logprobs or []
        logprobs = {
            "content": chat_logprobs(generation.model.tokenizer, completion.token_ids, entries, num_top),
            "refusal": None,
        }
    choice = {
        "index": completion.index,
        "message": message_json(completion.message or AssistantMessage()),
        "logprobs": logprobs,
        **ending_json(completion),
    }
    if body.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def message_json(message: AssistantMessage) -> dict[str, Any]:
    """Return the message in OpenAI's form."""
    shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.content is None and not message.tool_calls:
        shown["content"] = ""
    if message.reasoning_content is not None:
        shown["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return shown
