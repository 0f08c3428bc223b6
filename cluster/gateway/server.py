"""Gateway: the gRPC front. Text comes in and goes out here; behind it there are only token ids."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ...proto.errors import ConfigError, DuplicateRequest, QuireError, RequestAborted
from ..api.grpc_status import to_grpc_status
from ..api.request_messages import prompt_from_message, sampling_from_message
from ..api.response_messages import completion_to_message, event_to_message
from ..api.security import ListenAddress, Security
from ..host.background import run_in_background
from ..requests.chat import Chat
from ..requests.output_processor import Answers
from ..requests.outputs import Completion, Event, Started, collect, collect_prompt_logprobs
from ..requests.request import Request
from ..requests.request_stream import follow
from .admin import AdminService, Fleet
from .handlers import answering_errors, authorization
from .request_migration import MigratingRequest
from .served_models import ServedModel, ServedModels

MAX_MESSAGE_BYTES = 4 << 20
MAX_STREAMS_PER_CONNECTION = 4096
# Prompts longer than this are tokenised beside the event loop, so that they hold up no stream.
LONG_PROMPT_CHARS = 4096

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
_HEALTH_SERVICES = (health.OVERALL_HEALTH, INFERENCE)
_OPEN_METHODS = f"/{health.SERVICE_NAME}/"

RequestName = tuple[str, str]  # tenant and request_id: no tenant can end or hold up another's request

_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    # A second server on the port must fail, not silently take half of the calls.
    ("grpc.so_reuseport", 0),
    # A client whose machine vanished is noticed after 40 s, and its sequences are freed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class Gateway:
    """Serves models over gRPC: quire.v1, health and reflection.

    Args:
        models: what is served; its owner closes it after the gateway.
        listen: ``HOST:PORT``.
        insecure: allow an address that others can reach without TLS and tokens.
        fleet: what operators may change; None: nothing.

    Raises:
        ConfigError: the address cannot be used, or not without TLS and tokens.
    """

    def __init__(
        self,
        models: ServedModels,
        listen: str = "127.0.0.1:0",
        *,
        security: Security | None = None,
        insecure: bool = False,
        fleet: Fleet | None = None,
    ) -> None:
        self._address = ListenAddress.parse(listen)
        self._security = security or Security()
        self._security.check_listen(self._address, insecure=insecure)
        self._models = models
        self._health = health.aio.HealthServicer()
        self._inference = InferenceService(models, self._security)
        self._admin = AdminService(models, self._security, fleet)
        self._server: grpc.aio.Server | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    async def start(self) -> str:
        """Listens, and answers as soon as it returns; being ready comes later.

        Returns:
            The bound ``HOST:PORT``.

        Raises:
            ConfigError: the port is taken, or the certificate cannot be used.
        """
        self._server = grpc.aio.server(interceptors=(TokenCheck(self._security),), options=_SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (INFERENCE, ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        await self._set_serving(False)
        port = self._bind(self._server)
        if port is None:
            # gRPC's server must end with its event loop, so no traceback may keep it.
            await self.stop(0)
            what = (
                "" if self._security.certificate is None else ", or the TLS certificate or key is not valid"
            )
            raise ConfigError(
                f"cannot listen on {self._address}: the address is in use or not this machine's{what}"
            )
        await self._server.start()
        self._monitor = run_in_background(self._keep_health(), "keeping the gateway's health")
        return str(self._address.with_port(port))

    async def wait_ready(self) -> None:
        """Returns once a request would be answered. The caller sets the deadline."""
        await self._ready.wait()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuses new calls, gives running ones `grace_s` to end, then cancels them. Safe to call twice."""
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.gather(self._monitor, return_exceptions=True)
            self._monitor = None
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(grace_s)
            self._server = None

    def _bind(self, server: grpc.aio.Server) -> int | None:
        """The port; None where the address or the certificate cannot be used."""
        credentials = self._security.server_credentials()
        try:
            if credentials is None:
                return server.add_insecure_port(str(self._address))
            return server.add_secure_port(str(self._address), credentials)
        except RuntimeError:  # gRPC's own log says more
            return None

    async def _keep_health(self) -> None:
        """SERVING as long as a model is."""
        while True:
            if self._models.is_ready != self._ready.is_set():
                await self._set_serving(self._models.is_ready)
            else:
                await self._models.wait_for_change()

    async def _set_serving(self, is_serving: bool) -> None:
        if is_serving:
            self._ready.set()
        else:
            self._ready.clear()
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in _HEALTH_SERVICES:
            await self._health.set(service, status)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """quire.v1.Inference over all models."""

    def __init__(self, models: ServedModels, security: Security) -> None:
        self._models = models
        self._security = security
        self._running: dict[RequestName, MigratingRequest] = {}

    @answering_errors
    async def Generate(
        self, message: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.GenerateResponse:
        model = self._models.find(message.model)
        request = await self._check(model, message, context)
        async with self._events(model, request) as events:
            told = [event async for event in events]
        of_prompt = None if request.sampling.prompt_logprobs is None else collect_prompt_logprobs(told)
        return completion_to_message(Completion(request.request_id, model.name, collect(told), of_prompt))

    @answering_errors
    async def GenerateStream(
        self, message: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        model = self._models.find(message.model)
        request = await self._check(model, message, context)
        async with self._events(model, request) as events:
            async for event in events:
                await context.write(event_to_message(event))

    @answering_errors
    async def Abort(
        self, message: inference_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.AbortResponse:
        running = self._running.get((self._tenant(message.tenant, context), message.request_id))
        if running is not None:
            running.end(RequestAborted(f"request {message.request_id!r} was aborted"))
        return inference_pb2.AbortResponse(aborted=running is not None)

    @answering_errors
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
        tenant = self._tenant(message.tenant, context)
        if (tenant, message.request_id) in self._running:
            raise DuplicateRequest(f"request {message.request_id!r} is running already")
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
        is_quick = not isinstance(prompt, Chat) and len(prompt) <= LONG_PROMPT_CHARS
        return check() if is_quick else await asyncio.to_thread(check)

    def _tenant(self, claimed: str, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """Whose call it is. Raises InvalidRequest where its token says otherwise than it does."""
        return self._security.tenant(authorization(context.invocation_metadata()), claimed)

    @asynccontextmanager
    async def _events(self, model: ServedModel, request: Request) -> AsyncIterator[AsyncIterator[Event]]:
        """Runs the request. However the block is left, all its answers have ended and their blocks are free."""
        name = request.tenant, request.request_id
        if name in self._running:  # it may have come while a long prompt was tokenised
            raise DuplicateRequest(f"request {request.request_id!r} is running already")
        running = self._running[name] = model.pool.submit(request)
        try:
            yield self._answer(model, request, running)
        finally:
            running.abort()
            del self._running[name]

    async def _answer(
        self, model: ServedModel, request: Request, running: MigratingRequest
    ) -> AsyncIterator[Event]:
        yield Started(request.request_id, model.name, len(request.prompt_token_ids))
        async for piece in follow(running, Answers(request, model.tokenizer)):
            yield piece


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without a token of this server. Health is open: a load balancer has none."""

    def __init__(self, security: Security) -> None:
        self._security = security

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not handler_call_details.method.startswith(_OPEN_METHODS):
            try:
                self._security.check_call(authorization(handler_call_details.invocation_metadata))
            except QuireError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: QuireError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that answers any call, of one message or many, with the error."""

    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(to_grpc_status(error))

    return grpc.stream_stream_rpc_method_handler(refuse)
