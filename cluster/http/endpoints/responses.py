"""/v1/responses: OpenAI's responses, which may continue a response that is still kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from ....proto.errors import InvalidRequest, QuireError, RequestNotFound
from ...gateway.generation import GenerationCall
from ...gateway.retention import RetainedRequests, RetentionLimits
from ...gateway.services import GatewayServices
from ..call_context import preparing, renamed_fields, with_context
from ..disconnect import unless_client_leaves
from ..errors import openai_error_event
from ..event_stream import EventStream
from ..json_text import json_text
from ..response_head import ResponseHead
from ..response_stream import ResponseBuilder, assistant_message
from ..schema.error_body import OPENAI_ERRORS, WHOLE_OR_STREAM
from ..schema.response_request import Message, ResponseRequest

# Kept in memory, by the gateway that made them.
RETENTION = RetentionLimits(
    retention_s=3600.0, max_requests=1024, max_bytes=32 << 20, max_total_bytes=128 << 20
)

# field of quire.v1 |-> field of this endpoint
_FIELDS = {
    "sampling.max_tokens": "max_output_tokens",
    "prompt": "input",
    "chat": "input",
    "chat.messages": "input",
    "chat.template_options": "chat_template_kwargs",
}


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation up to it."""

    response: dict[str, Any]
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class _Call:
    """A checked call: what runs, and the conversation without its answer."""

    head: ResponseHead
    body: ResponseRequest
    generation: GenerationCall
    messages: list[Message]


class Responses:
    """Runs the calls of one server and keeps their responses for a while."""

    def __init__(self, services: GatewayServices) -> None:
        self._services = services
        self._stored: RetainedRequests[StoredResponse] = RetainedRequests(RETENTION)

    def prepare(self, body: ResponseRequest, request: Request) -> _Call:
        """Raises InvalidRequest, also for a previous response that is not kept."""
        with preparing(self._services, _FIELDS):
            tenant = self.tenant(request)
            messages = [*self._previous(tenant, body.previous_response_id), *body.messages()]
            call = GenerationCall(
                body.chat(messages),
                body.sampling(),
                model=body.model or "",
                priority=-body.priority,
                cache_salt=body.cache_salt,
            )
            call = with_context(call, request, self._services)
        return _Call(ResponseHead.new("resp_"), body, call, messages)

    async def run(self, call: _Call) -> Response:
        with renamed_fields(_FIELDS):
            async with self._services.generation.run(call.generation) as generation:
                builder = ResponseBuilder(call.head, call.body, generation.model_name)
                async for event in generation.events:
                    builder.event(event)
        self._store(call, builder.response)
        return call.head.response(builder.response)

    async def stream(self, call: _Call) -> AsyncGenerator[bytes, None]:
        with renamed_fields(_FIELDS):
            async with self._services.generation.run(call.generation) as generation:
                builder = ResponseBuilder(call.head, call.body, generation.model_name)
                try:
                    async for event in generation.events:
                        if chunk := builder.event(event):
                            yield chunk.encode()
                except QuireError as error:
                    if not builder.has_begun:
                        raise
                    yield builder.failed(error).encode()
                    return
        self._store(call, builder.response)

    def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises RequestNotFound for a response that is not kept."""
        stored = self._stored.get((tenant, response_id))
        if stored is None:
            raise RequestNotFound(f"response {response_id[:100]!r} is not kept here, or not any more")
        return stored

    def discard(self, tenant: str, response_id: str) -> None:
        """Raises RequestNotFound for a response that is not kept."""
        self.find(tenant, response_id)
        self._stored.discard((tenant, response_id))

    def tenant(self, request: Request) -> str:
        return self._services.authenticator.tenant(request.state.caller, "")

    def _previous(self, tenant: str, response_id: str | None) -> list[Message]:
        if response_id is None:
            return []
        try:
            return self.find(tenant, response_id).messages
        except RequestNotFound as error:
            raise InvalidRequest("previous_response_id", f"is unknown: {error}") from error

    def _store(self, call: _Call, response: dict[str, Any]) -> None:
        if not call.body.keeps:
            return
        stored = StoredResponse(response, [*call.messages, assistant_message(response)])
        num_bytes = len(json_text(response)) + len(json_text(stored.messages))
        self._stored.put((call.generation.tenant, call.head.id), stored, num_bytes)


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=OPENAI_ERRORS)
    responses = Responses(services)

    @router.post("/v1/responses", summary="Answer items, or continue a response", responses=WHOLE_OR_STREAM)
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        call = responses.prepare(body, request)
        if body.stream:
            return EventStream(responses.stream(call), openai_error_event, call.head.headers)
        async with unless_client_leaves(request.receive):
            return await responses.run(call)

    @router.get("/v1/responses/{response_id}", summary="Return a response that is kept")
    async def get_response(response_id: str, request: Request) -> dict[str, Any]:
        return responses.find(responses.tenant(request), response_id).response

    @router.delete("/v1/responses/{response_id}", summary="Drop a response that is kept")
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        responses.discard(responses.tenant(request), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router
