"""InferenceService: quire.v1.Inference over all models of a gateway."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

from ....proto import inference_pb2, inference_pb2_grpc
from ....proto.errors import InvalidRequest, QuireError
from ....proto.pooling import PoolingParams
from ....proto.sampling import SamplingParams
from ...client.wire.message_fields import to_message
from ...client.wire.request_messages import (
    prompt_from_message,
    resume_position_from_message,
    sampling_from_message,
)
from ...client.wire.response_messages import event_to_message, output_to_message
from ...text.requests.outputs import PromptLogprobsDelta, collect_output
from ..access.authentication import authorization_of
from ..admin.services import GatewayServices, server_version
from ..generation.generation import Generation, GenerationCall
from ..generation.pooled_calls import PooledResponse, check_num_inputs, pool_all
from ..routing.served_models import ServedModel
from .large_requests import MAX_REQUEST_BYTES, LargeRequests
from .message_guard import check_counts
from .responses import Context, convert_errors, write_in_time

# As many as a JSON body may have.
MAX_DETOKENIZED = 1 << 19

Pieces = AsyncIterator[inference_pb2.RequestPiece]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """quire.v1.Inference over all models."""

    def __init__(self, services: GatewayServices, max_message_bytes: int) -> None:
        self._models = services.models
        self._generation = services.generation
        self._authenticator = services.authenticator
        self._on_refused = services.on_refused
        self._max_message_bytes = max_message_bytes
        self._large_requests = LargeRequests()
        self._started_at = time.monotonic()

    @convert_errors
    async def Generate(
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        return await _whole(self._generation.run(self._call(message, context)))

    @convert_errors
    async def GenerateStream(self, message: inference_pb2.GenerateRequest, context: Context) -> None:
        await _stream(self._generation.run(self._call(message, context)), context)

    @convert_errors
    async def GenerateInPieces(self, pieces: Pieces, context: Context) -> inference_pb2.GenerateResponse:
        return await _whole(self._run_pieces(pieces, context))

    @convert_errors
    async def GenerateStreamInPieces(self, pieces: Pieces, context: Context) -> None:
        await _stream(self._run_pieces(pieces, context), context)

    @asynccontextmanager
    async def _run_pieces(self, pieces: Pieces, context: Context) -> AsyncIterator[Generation]:
        """Run a request that comes in pieces, whose bytes are reserved until it has started.

        Then neither its message nor the files of its images are held any more.
        """
        async with AsyncExitStack() as running:
            async with AsyncExitStack() as reserved:
                with self._counting_refusals():
                    receiving = self._large_requests.receive(pieces, self._tenant("", context))
                    message = await reserved.enter_async_context(receiving)
                call = self._generation.run(self._call(message, context))
                del message
                generation = await running.enter_async_context(call)
                del call
            yield generation

    @convert_errors
    async def Embed(
        self, message: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        vectors = await pool_all(self._generation, self._embed_calls(message, context))
        return await asyncio.to_thread(embed_response, message.model or vectors[0].model.name, vectors)

    @convert_errors
    async def Abort(
        self, message: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        aborted = self._generation.abort(self._tenant(message.tenant, context), message.request_id)
        return inference_pb2.AbortResponse(aborted=aborted)

    @convert_errors
    async def ListModels(
        self, message: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=map(_model_to_message, self._models))

    @convert_errors
    async def Tokenize(
        self, message: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        model = self._models.find(message.model)
        adds_special_tokens = message.add_special_tokens if message.HasField("add_special_tokens") else True
        tenant = self._tenant("", context)
        call = GenerationCall(prompt_from_message(message), SamplingParams(), tenant=tenant)
        prompt = await self._generation.with_fetched_images(model, call)
        check = functools.partial(model.checker.token_ids, prompt, add_special_tokens=adds_special_tokens)
        token_ids = await self._generation.prompt_concurrency.run(tenant, check)
        texts = map(model.tokenizer.token_text, token_ids) if message.return_tokens else ()
        return await asyncio.to_thread(
            inference_pb2.TokenizeResponse,
            token_ids=token_ids,
            tokens=texts,
            max_model_len=model.config.model.max_model_len,
        )

    @convert_errors
    async def Detokenize(
        self, message: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        if len(message.token_ids) > MAX_DETOKENIZED:
            problem = f"has {len(message.token_ids)} tokens, must have at most {MAX_DETOKENIZED}"
            raise InvalidRequest("token_ids", problem)
        model, token_ids = self._models.find(message.model), list(message.token_ids)
        model.checker.check_token_ids("token_ids", token_ids)
        text = await asyncio.to_thread(
            model.tokenizer.decode, token_ids, skip_special_tokens=message.skip_special_tokens
        )
        return inference_pb2.DetokenizeResponse(text=text)

    @convert_errors
    async def GetServerInfo(
        self, message: inference_pb2.GetServerInfoRequest, context: Context
    ) -> inference_pb2.GetServerInfoResponse:
        limits = self._generation.limits
        return inference_pb2.GetServerInfoResponse(
            version=server_version(),
            uptime_s=time.monotonic() - self._started_at,
            models=map(_model_to_message, self._models),
            resume_window_s=limits.resume_window_s,
            retention_s=limits.retention_s,
            max_message_bytes=self._max_message_bytes,
            max_request_bytes=MAX_REQUEST_BYTES,
        )

    def _call(self, message: inference_pb2.GenerateRequest, context: Context) -> GenerationCall:
        """Raises Unauthenticated for a call without a valid token, InvalidRequest for an invalid field."""
        with self._counting_refusals():
            model, tenant = self._models.find(message.model), self._tenant(message.tenant, context)
            check_counts(message, model.config.model.max_model_len)
            return GenerationCall(
                prompt_from_message(message),
                sampling_from_message(message.sampling),
                model=message.model,
                request_id=message.request_id,
                tenant=tenant,
                priority=message.priority,
                timeout_s=context.time_remaining(),
                cache_salt=message.cache_salt,
                add_special_tokens=message.add_special_tokens
                if message.HasField("add_special_tokens")
                else True,
                after_event=message.after_sequence_number
                if message.HasField("after_sequence_number")
                else None,
                is_resumable=message.resumable,
                resume_position=resume_position_from_message(message.received)
                if message.HasField("received")
                else None,
                trace_headers=trace_headers(context),
            )

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except QuireError as error:
            self._on_refused(error)
            raise

    def _embed_calls(self, message: inference_pb2.EmbedRequest, context: Context) -> list[GenerationCall]:
        """Raises Unauthenticated for a call without a valid token, InvalidRequest for an invalid field."""
        with self._counting_refusals():
            self._models.find(message.model)
            tenant = self._tenant(message.tenant, context)
            headers, left_s = trace_headers(context), context.time_remaining()
            return [
                replace(call, tenant=tenant, timeout_s=left_s, trace_headers=headers)
                for call in embed_calls(message)
            ]

    def _tenant(self, claimed: str, context: Context) -> str:
        """Return the caller's tenant. Raises InvalidRequest if the call's token belongs to another tenant."""
        caller = self._authenticator.caller(authorization_of(context.invocation_metadata()))
        return self._authenticator.tenant(caller, claimed)


async def _whole(running: AbstractAsyncContextManager[Generation]) -> inference_pb2.GenerateResponse:
    async with running as generation:
        events = [event async for event in generation.events]
    request = generation.request
    output = collect_output(
        events,
        prompt=None,  # not part of the response
        prompt_token_ids=request.prompt_token_ids.tolist(),
        with_prompt_logprobs=request.sampling.prompt_logprobs is not None,
    )
    if output.prompt_logprobs is None:
        return output_to_message(output, request.sampling)
    return await asyncio.to_thread(output_to_message, output, request.sampling)


async def _stream(running: AbstractAsyncContextManager[Generation], context: Context) -> None:
    async with running as generation:
        sampling = generation.request.sampling
        async for number, event in generation.numbered_events:
            if isinstance(event, PromptLogprobsDelta):
                response = await asyncio.to_thread(event_to_message, event, sampling)
            else:
                response = event_to_message(event, sampling)
            response.sequence_number = number
            await write_in_time(context, response)


def _model_to_message(model: ServedModel) -> inference_pb2.Model:
    return to_message(inference_pb2.Model, model.config.model)


def trace_headers(context: Context) -> dict[str, str]:
    """Return the caller's W3C trace context."""
    metadata = context.invocation_metadata() or ()
    return {key: str(value) for key, value in metadata if key in ("traceparent", "tracestate")}


def embed_calls(message: inference_pb2.EmbedRequest) -> list[GenerationCall]:
    """Return a call for each prompt, without its tenant. Raises InvalidRequest for an invalid field."""
    check_num_inputs("prompts", len(message.prompts))
    params = PoolingParams(
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        use_activation=message.use_activation if message.HasField("use_activation") else True,
        truncate_prompt_tokens=(
            message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None
        ),
    )
    adds_special_tokens = message.add_special_tokens if message.HasField("add_special_tokens") else True
    return [
        GenerationCall(
            _prompt(index, prompt),
            SamplingParams(),
            model=message.model,
            priority=message.priority,
            cache_salt=message.cache_salt,
            add_special_tokens=adds_special_tokens,
            pooling=params,
        )
        for index, prompt in enumerate(message.prompts)
    ]


def embed_response(model: str, responses: Sequence[PooledResponse]) -> inference_pb2.EmbedResponse:
    """Return the vectors of the prompts, and the tokens of all."""
    usages = [response.result.usage for response in responses]
    return inference_pb2.EmbedResponse(
        model=model,
        vectors=(inference_pb2.Vector(values=response.result.values) for response in responses),
        usage=inference_pb2.Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
        ),
    )


def _prompt(index: int, prompt: inference_pb2.EmbedPrompt) -> str | list[int]:
    kind = prompt.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest(f"prompts[{index}]", "is empty, must have text or token_ids")
    return prompt.text if kind == "text" else list(prompt.token_ids.ids)
