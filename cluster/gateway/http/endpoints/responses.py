"""/v1/responses: OpenAI's responses, which may continue others that are kept, and may run in the background."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from .....proto.errors import InvalidRequest, QuireError, RequestNotFound
from ...admin.services import GatewayServices
from ...generation.generation import GenerationCall
from ...generation.retention import RequestKey
from ..calls import preparing, prompt_token_ids, renamed_fields, unless_client_leaves, with_context
from ..errors import OPENAI_ERRORS, WHOLE_OR_STREAM, openai_error_event
from ..event_stream import EventStream
from ..json_bodies import BodyRoute, ResponseHead
from ..response_store import BackgroundResponse, ResponseStore
from ..response_stream import ResponseBuilder
from ..schema.response_request import Message, ResponseRequest

# field of quire.v1 |-> field of this endpoint
_FIELDS = {
    "sampling.max_tokens": "max_output_tokens",
    "prompt": "input",
    "chat": "input",
    "chat.messages": "input",
    "chat.template_options": "chat_template_kwargs",
}


@dataclass(frozen=True, slots=True)
class _Call:
    """A checked call: what runs, and the conversation without its answer."""

    head: ResponseHead
    body: ResponseRequest
    generation: GenerationCall
    messages: list[Message]

    @property
    def key(self) -> RequestKey:
        return self.generation.tenant, self.head.id


class Responses:
    """Runs the calls of one server and keeps their responses for a while."""

    def __init__(self, services: GatewayServices) -> None:
        self._services = services
        self.store = ResponseStore()

    def prepare(self, body: ResponseRequest, request: Request) -> _Call:
        """Raises InvalidRequest, also for a previous response that is not kept."""
        with preparing(self._services, _FIELDS):
            if body.background and not body.keeps:
                raise InvalidRequest("background", "needs a response that is stored")
            messages = [*self._previous(request, body.previous_response_id), *body.messages()]
            call = body.call(body.chat(messages), body.sampling())
            call = with_context(call, request, self._services)
        return _Call(ResponseHead.new("resp_"), body, call, messages)

    async def run(self, call: _Call) -> Response:
        with renamed_fields(_FIELDS):
            async with self._services.generation.run(call.generation) as generation:
                builder = ResponseBuilder(call.head, call.body, generation)
                async for event in generation.events:
                    builder.event(event)
        self._keep(call, builder.response)
        return call.head.response(builder.response)

    async def stream(self, call: _Call) -> AsyncGenerator[bytes, None]:
        with renamed_fields(_FIELDS):
            async with self._services.generation.run(call.generation) as generation:
                builder = ResponseBuilder(call.head, call.body, generation)
                try:
                    async for event in generation.events:
                        if chunk := builder.event(event):
                            yield chunk
                except QuireError as error:
                    if not builder.has_begun:
                        raise
                    yield builder.failed(error)
                    return
        self._keep(call, builder.response)

    async def start(self, call: _Call) -> BackgroundResponse:
        """Start a response in the background.

        Raises:
            Overloaded, QuotaExceeded: too many run.
            QuireError: the request is refused.
        """

        def on_end(ended: BackgroundResponse) -> None:
            self.store.remove_running(call.key)
            self.store.put(call.key, call.messages, ended.response, ended.events)

        async with AsyncExitStack() as cleanup:
            with preparing(self._services, _FIELDS):
                cleanup.enter_context(self.store.slot(call.generation.tenant))
            with renamed_fields(_FIELDS):
                generation = await cleanup.enter_async_context(self._services.generation.run(call.generation))
            builder = ResponseBuilder(call.head, call.body, generation)
            running = BackgroundResponse(builder, generation, cleanup.pop_all(), on_end)
            self.store.add_running(call.key, running)
        return running

    def key(self, request: Request, response_id: str) -> RequestKey:
        return self._services.authenticator.tenant(request.state.caller, ""), response_id

    def _previous(self, request: Request, response_id: str | None) -> list[Message]:
        if response_id is None:
            return []
        try:
            return self.store.conversation(self.key(request, response_id))
        except RequestNotFound as error:
            raise InvalidRequest("previous_response_id", f"is unknown: {error}") from error

    def _keep(self, call: _Call, response: dict[str, Any]) -> None:
        if call.body.keeps:
            self.store.put(call.key, call.messages, response)


def router(services: GatewayServices) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], responses=OPENAI_ERRORS, route_class=BodyRoute)
    responses = Responses(services)

    @router.post("/v1/responses", summary="Answer items, or continue a response", responses=WHOLE_OR_STREAM)
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        call = responses.prepare(body, request)
        if body.background:
            running = await responses.start(call)
            if body.stream:
                return EventStream(running.events.read(), openai_error_event, call.head.headers)
            return call.head.response(running.response)
        if body.stream:
            return EventStream(responses.stream(call), openai_error_event, call.head.headers)
        async with unless_client_leaves(request.receive):
            return await responses.run(call)

    @router.post("/v1/responses/input_tokens", summary="Count the tokens of items")
    async def count_input_tokens(body: ResponseRequest, request: Request) -> dict[str, Any]:
        call = responses.prepare(body, request).generation
        with preparing(services, _FIELDS):
            count = len(await prompt_token_ids(services, call))
        return {"object": "response.input_tokens", "input_tokens": count}

    @router.get(
        "/v1/responses/{response_id}/input_items", summary="List what a response that is kept answers"
    )
    async def list_input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        items = responses.store.input_items(responses.key(request, response_id))
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item["id"] for item in items]
            items = items[ids.index(after) + 1 :] if after in ids else []
        page = items[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        return {"object": "list", "data": page, "has_more": len(items) > limit, **ends}

    @router.get(
        "/v1/responses/{response_id}",
        summary="Return a response that is kept, or the events of one that was made in the background",
        responses=WHOLE_OR_STREAM,
        response_model=None,
    )
    async def get_response(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response | dict[str, Any]:
        key = responses.key(request, response_id)
        if stream:
            return EventStream(responses.store.events(key).read(starting_after), openai_error_event, {})
        return responses.store.response(key)

    @router.post("/v1/responses/{response_id}/cancel", summary="End a response that runs in the background")
    async def cancel_response(response_id: str, request: Request) -> dict[str, Any]:
        return await responses.store.cancel(responses.key(request, response_id))

    @router.delete("/v1/responses/{response_id}", summary="Drop a response that is kept")
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        await responses.store.discard(responses.key(request, response_id))
        return {"id": response_id, "object": "response", "deleted": True}

    return router
