"""InferenceService: quire.v1.Inference over all models of a gateway."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from ...proto import inference_pb2, inference_pb2_grpc
from ...proto.errors import DuplicateRequest, RequestAborted
from ..api.request_messages import prompt_from_message, sampling_from_message
from ..api.response_messages import event_to_message, output_to_message
from ..requests.chat import Chat
from ..requests.output_processor import OutputProcessor
from ..requests.outputs import RequestStarted, StreamEvent, collect_output
from ..requests.request import Request
from ..requests.request_stream import output_events
from .authentication import Authenticator
from .grpc_errors import convert_errors
from .request_migration import MigratingRequest
from .served_models import ServedModel, ServedModels

# Longer prompts are tokenized in a thread, so that they do not block other streams in the event loop.
LONG_PROMPT_CHARS = 4096

RequestKey = tuple[str, str]  # (tenant, request_id): no tenant can abort or block another tenant's request


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """quire.v1.Inference over all models."""

    def __init__(self, models: ServedModels, authenticator: Authenticator) -> None:
        self._models = models
        self._authenticator = authenticator
        self._running: dict[RequestKey, MigratingRequest] = {}

    @convert_errors
    async def Generate(
        self, message: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.GenerateResponse:
        model = self._models.find(message.model)
        request = await self._check(model, message, context)
        async with self._events(model, request) as stream:
            events = [event async for event in stream]
        output = collect_output(
            events,
            prompt=None,  # not part of the response
            prompt_token_ids=request.prompt_token_ids.tolist(),
            with_prompt_logprobs=request.sampling.prompt_logprobs is not None,
        )
        return output_to_message(output)

    @convert_errors
    async def GenerateStream(
        self, message: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        model = self._models.find(message.model)
        request = await self._check(model, message, context)
        async with self._events(model, request) as stream:
            async for event in stream:
                await context.write(event_to_message(event))

    @convert_errors
    async def Abort(
        self, message: inference_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.AbortResponse:
        running = self._running.get((self._tenant(message.tenant, context), message.request_id))
        if running is not None:
            running.end(RequestAborted(f"request {message.request_id!r} was aborted"))
        return inference_pb2.AbortResponse(aborted=running is not None)

    @convert_errors
    async def ListModels(
        self, message: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    name=model.name,
                    architecture=model.config.model.architecture,
                    max_model_len=model.config.model.max_model_len,
                    vocab_size=model.config.model.vocab_size,
                )
                for model in self._models
            ]
        )

    async def _check(
        self,
        model: ServedModel,
        message: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> Request:
        """Return the validated and tokenized request."""
        tenant = self._tenant(message.tenant, context)
        self._check_not_running((tenant, message.request_id))
        sampling = sampling_from_message(message.sampling)
        prompt = prompt_from_message(message)
        check = functools.partial(
            model.checker.check,
            prompt,
            sampling,
            request_id=message.request_id,
            tenant=tenant,
            priority=message.priority,
            timeout_s=context.time_remaining(),
            cache_salt=message.cache_salt,
            add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
        )
        is_short = not isinstance(prompt, Chat) and len(prompt) <= LONG_PROMPT_CHARS
        return check() if is_short else await asyncio.to_thread(check)

    def _tenant(self, claimed: str, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """Return the caller's tenant. Raises InvalidRequest if the call's token belongs to another tenant."""
        return self._authenticator.tenant(context.invocation_metadata(), claimed)

    def _check_not_running(self, key: RequestKey) -> None:
        if key in self._running:
            raise DuplicateRequest(f"request {key[1]!r} is running already")

    @asynccontextmanager
    async def _events(
        self, model: ServedModel, request: Request
    ) -> AsyncIterator[AsyncIterator[StreamEvent]]:
        """Run the request. On every exit from the block its sequences have ended and their blocks are free."""
        key = request.tenant, request.request_id
        self._check_not_running(key)  # a duplicate may have started while a long prompt was tokenized
        running = self._running[key] = model.pool.submit(request)
        try:
            yield self._stream(model, request, running)
        finally:
            running.abort()
            del self._running[key]

    async def _stream(
        self, model: ServedModel, request: Request, running: MigratingRequest
    ) -> AsyncIterator[StreamEvent]:
        yield RequestStarted(request.request_id, model.name, len(request.prompt_token_ids))
        async for event in output_events(running, OutputProcessor(request, model.tokenizer)):
            yield event
