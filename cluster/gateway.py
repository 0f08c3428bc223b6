"""Gateway: the gRPC front of a replica. Text comes in and goes out here; behind it there are only token ids."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ..proto.config import EngineConfig
from ..proto.errors import (
    ConfigError,
    DuplicateRequest,
    InvalidRequest,
    ProtocolError,
    QuireError,
    ReplicaUnavailable,
    RequestAborted,
)
from ..proto.sampling import SamplingParams
from .answer import Answers
from .events import Completion, Event, Started, collect
from .messages import completion_to_message, event_to_message, replica_to_message, sampling_from_message
from .replica_client import ReplicaClient, RunningRequest, follow
from .requests import Prompt, Request, RequestChecker
from .security import ListenAddress, Security
from .statuses import to_grpc_status
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20
MAX_STREAMS_PER_CONNECTION = 4096
CANARY_TIMEOUT_S = 60.0
CANARY_RETRY_S = 1.0
STATUS_TIMEOUT_S = 5.0
# Prompts longer than this are tokenised beside the event loop, so that they hold up no stream.
LONG_PROMPT_CHARS = 4096

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
_HEALTH_SERVICES = (health.OVERALL_HEALTH, INFERENCE)
_OPEN_METHODS = f"/{health.SERVICE_NAME}/"

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

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Handler = Callable[[Any, RequestT, grpc.aio.ServicerContext[Any, Any]], Awaitable[ResponseT]]


class Gateway:
    """Serves one replica over gRPC: quire.v1, health and reflection.

    Args:
        config: the replica's, its number of blocks filled in.
        replica: started already; the caller closes it after the gateway.
        listen: ``HOST:PORT``.
        insecure: allow an address that others can reach without TLS and tokens.

    Raises:
        ConfigError: the address cannot be used, or not without TLS and tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        replica: ReplicaClient,
        listen: str = "127.0.0.1:0",
        *,
        security: Security | None = None,
        insecure: bool = False,
    ) -> None:
        self._address = ListenAddress.parse(listen)
        self._security = security or Security()
        self._security.check_listen(self._address, insecure=insecure)
        self._config = config
        self._replica = replica
        self._health = health.aio.HealthServicer()
        self._inference = InferenceService(config, tokenizer, replica, self._security)
        self._server: grpc.aio.Server | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._is_serving = False
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
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(self), self._server)
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
        self._monitor = asyncio.create_task(self._keep_health())
        return str(self._address.with_port(port))

    async def wait_ready(self) -> None:
        """Returns once a canary token has come through all ranks. The caller sets the deadline."""
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

    async def replica_status(self) -> admin_pb2.Replica:
        """The replica as an operator sees it; one that does not answer is described, not an error."""
        try:
            status = await self._replica.status(STATUS_TIMEOUT_S)
        except ReplicaUnavailable as error:
            return admin_pb2.Replica(
                replica_id=self._replica.replica_id, model=self._config.model.name, problem=str(error)
            )
        problem = self._replica.problem or status.problem
        if not problem and not self._is_serving:
            problem = "no canary token has come through all ranks yet"
        return replica_to_message(status, problem)

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
        """SERVING from a canary token on, until the replica has a problem; then again."""
        while True:
            await self._replica.wait_until(well=True)
            try:
                # Not wait_for, which until Python 3.12 can lose the cancellation that ends this task.
                async with asyncio.timeout(CANARY_TIMEOUT_S):
                    await self._inference.run_canary()
            except (QuireError, TimeoutError) as error:
                logger.warning(
                    "the canary request failed: %s", error or f"no token in {CANARY_TIMEOUT_S:g} s"
                )
                await asyncio.sleep(CANARY_RETRY_S)
                continue
            await self._set_serving(True)
            await self._replica.wait_until(well=False)
            await self._set_serving(False)

    async def _set_serving(self, is_serving: bool) -> None:
        self._is_serving = is_serving
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


def _answering_errors(handler: Handler[RequestT, ResponseT]) -> Handler[RequestT, ResponseT]:
    """Turns what the handler raises into a gRPC status; a fault of ours is logged, and INTERNAL."""

    async def answering(
        self: Any, request: RequestT, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ResponseT:
        try:
            return await handler(self, request, context)
        except QuireError as error:
            await context.abort_with_status(to_grpc_status(error))
        except grpc.aio.AbortError:
            raise
        except Exception:
            logger.exception("a call failed")
            fault = ProtocolError("the gateway failed on this call; its log says why")
            await context.abort_with_status(to_grpc_status(fault))
        raise AssertionError("abort raises")

    return answering


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """quire.v1.Inference over one replica."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, replica: ReplicaClient, security: Security
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._replica = replica
        self._security = security
        self._checker = RequestChecker(config, tokenizer)
        self._running: dict[str, RunningRequest] = {}

    @_answering_errors
    async def Generate(
        self, message: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.GenerateResponse:
        request = await self._check(message, context)
        async with self._events(request) as events:
            outputs = collect([event async for event in events])
        return completion_to_message(Completion(request.request_id, self._config.model.name, outputs))

    @_answering_errors
    async def GenerateStream(
        self, message: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        request = await self._check(message, context)
        async with self._events(request) as events:
            async for event in events:
                await context.write(event_to_message(event))

    @_answering_errors
    async def Abort(
        self, message: inference_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.AbortResponse:
        running = self._running.get(message.request_id)
        if running is not None:
            running.end(RequestAborted(f"request {message.request_id!r} was aborted"))
        return inference_pb2.AbortResponse(aborted=running is not None)

    @_answering_errors
    async def ListModels(
        self, message: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.ListModelsResponse:
        model = self._config.model
        described = inference_pb2.Model(
            name=model.name,
            architecture=model.architecture,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        )
        return inference_pb2.ListModelsResponse(models=[described])

    async def run_canary(self) -> None:
        """Returns when a token has come through all ranks; raises QuireError when it failed."""
        request = self._checker.check([0], SamplingParams(max_tokens=1, temperature=0.0))
        async with self._events(request) as events:
            async for _ in events:
                pass

    async def _check(
        self, message: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Request:
        if message.request_id in self._running:
            raise DuplicateRequest(f"request {message.request_id!r} is running already")
        sampling = sampling_from_message(message.sampling)
        prompt = _prompt(message)
        check = functools.partial(
            self._checker.check,
            prompt,
            sampling,
            request_id=message.request_id,
            model=message.model,
            tenant=self._security.tenant(_authorization(context.invocation_metadata()), message.tenant),
            priority=message.priority,
            timeout_s=context.time_remaining(),
            cache_salt=message.cache_salt,
        )
        return check() if len(prompt) <= LONG_PROMPT_CHARS else await asyncio.to_thread(check)

    @asynccontextmanager
    async def _events(self, request: Request) -> AsyncIterator[AsyncIterator[Event]]:
        """Runs the request. However the block is left, all its answers have ended and their blocks are free."""
        if request.request_id in self._running:  # it may have come while a long prompt was tokenised
            raise DuplicateRequest(f"request {request.request_id!r} is running already")
        running = self._running[request.request_id] = self._replica.submit(request)
        try:
            yield self._answer(request, running)
        finally:
            running.abort()
            del self._running[request.request_id]

    async def _answer(self, request: Request, running: RunningRequest) -> AsyncIterator[Event]:
        yield Started(request.request_id, self._config.model.name, len(request.prompt_token_ids))
        async for piece in follow(running, Answers(request, self._tokenizer)):
            yield piece


class AdminService(admin_pb2_grpc.AdminServicer):
    """quire.v1.Admin of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @_answering_errors
    async def GetStatus(
        self, message: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(replicas=[await self._gateway.replica_status()])


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
                self._security.check_call(_authorization(handler_call_details.invocation_metadata))
            except QuireError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: QuireError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that answers any call, of one message or many, with the error."""

    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort_with_status(to_grpc_status(error))

    return grpc.stream_stream_rpc_method_handler(refuse)


def _authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | bytes | None:
    return dict(metadata or ()).get("authorization")


def _prompt(message: inference_pb2.GenerateRequest) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "is missing, must be text or token_ids")
    return message.text if kind == "text" else list(message.token_ids.ids)
