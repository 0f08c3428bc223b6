"""/v1/messages and /v1/messages/count_tokens: conversations as Anthropic's API has them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from fastapi import APIRouter, Request, Response

from ...admin.services import GatewayServices
from ...generation.generation import GenerationCall
from ..anthropic_stream import AnthropicStream, error_event, message_json
from ..calls import collect_all, preparing, renamed_fields, unless_client_leaves, with_context
from ..errors import ANTHROPIC_ERRORS, WHOLE_OR_STREAM
from ..event_stream import EventStream
from ..large_request import BodyRoute
from ..response_head import ResponseHead
from ..schema.anthropic_message import CountTokensRequest, MessagesRequest

# field of quire.v1 |-> field of this endpoint
_FIELDS = {
    "sampling.stop": "stop_sequences",
    "sampling.thinking_token_budget": "thinking.budget_tokens",
    "prompt": "messages",
    "chat": "messages",
    "chat.template_options": "chat_template_kwargs",
}


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], responses=ANTHROPIC_ERRORS, route_class=BodyRoute)

    @router.post("/v1/messages", summary="Continue a conversation", responses=WHOLE_OR_STREAM)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        head = ResponseHead.new("msg_")
        with preparing(services, _FIELDS):
            call = GenerationCall(body.chat(), body.sampling(), model=body.model or "")
            call = with_context(call, request, services)
        if body.stream:
            return EventStream(_stream(services, call, head), error_event, head.headers)
        async with unless_client_leaves(request.receive):
            with renamed_fields(_FIELDS):
                async with services.generation.run(call) as generation:
                    (output,) = await collect_all([generation])
        return head.response(message_json(head, output))

    @router.post("/v1/messages/count_tokens", summary="Count the tokens of a conversation")
    async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, int]:
        with preparing(services, _FIELDS):
            model = services.models.find(body.model or "")
            tenant = services.authenticator.tenant(request.state.caller, "")
            check = partial(model.checker.token_ids, body.chat())
            token_ids = await services.generation.prompt_turns.run(tenant, check)
        return {"input_tokens": len(token_ids)}

    return router


async def _stream(
    services: GatewayServices, call: GenerationCall, head: ResponseHead
) -> AsyncGenerator[bytes, None]:
    with renamed_fields(_FIELDS):
        async with services.generation.run(call) as generation:
            stream = AnthropicStream(head, generation)
            async for event in generation.events:
                if chunk := stream.event(event):
                    yield chunk.encode()
