"""Client and AsyncClient: quire.v1 in Python. They differ in who waits; all else is shared."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ...proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ...proto.errors import ConfigError
from ...proto.sampling import SamplingParams
from ..api.grpc_status import from_grpc_error
from ..api.request_messages import put_prompt, sampling_to_message, sendable
from ..api.response_messages import completion_from_message, event_from_message
from ..api.security import bearer
from ..requests.chat import Chat, Message
from ..requests.outputs import Completion, Event
from ..requests.request import Prompt

DEFAULT_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 10.0

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    # A server whose machine vanished is noticed after 40 s, not after the operating system's hours.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class RequestOptions(TypedDict, total=False):
    """What may be said of a request beside its prompt and its sampling, by keyword.

    Attributes:
        model: needed only where several are served.
        request_id: unique among the server's running requests; without one the server makes one up.
        tenant: whose request it is; a token that names a tenant says so by itself.
        priority: higher goes first, where the server's policy is ``priority``; 0 by default.
        cache_salt: KV of prompts is shared only between requests with the same salt.
        add_special_tokens: to a prompt of text, by the rule of the model's tokenizer; it does by default.
        timeout_s: the client's own by default; None as well.
    """

    model: str
    request_id: str
    tenant: str
    priority: int
    cache_salt: str
    add_special_tokens: bool
    timeout_s: float | None


class ChatOptions(RequestOptions, total=False):
    """What may be said of a conversation beside that.

    Attributes:
        continue_final_message: the answer goes on with the last message, which is the assistant's.
        template_options: what else the model's chat template takes, by name; ``{"enable_thinking": False}``
            for example. Numbers arrive as floating-point ones.
    """

    continue_final_message: bool
    template_options: Mapping[str, Any]


class _Connection:
    """What both clients share: how to connect, what to send, what an error means.

    Args:
        target: the server's ``HOST:PORT``.
        token: bearer token, where the server asks for one.
        tls_ca: PEM file of the authority that signed the server's certificate; None: no TLS.
        timeout_s: how long a call may take in all, where it says nothing else; None: as long as it takes.

    Raises:
        ConfigError: the authority's file cannot be read.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.target = target
        self._metadata = () if token is None else (bearer(token),)
        self._timeout_s = timeout_s
        self._channel = self._connect(None if tls_ca is None else _channel_credentials(Path(tls_ca)))
        # The generated stubs serve channels of both kinds and return what the channel's kind returns.
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def _connect(self, credentials: grpc.ChannelCredentials | None) -> Any:
        """Opens a channel; None: in the clear."""
        raise NotImplementedError

    def _options(self, timeout_s: float | None = None) -> dict[str, Any]:
        return {"metadata": self._metadata, "timeout": self._timeout_s if timeout_s is None else timeout_s}

    def _request(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions
    ) -> tuple[inference_pb2.GenerateRequest, dict[str, Any]]:
        """The message, and how to call. Raises InvalidRequest on what no message can hold."""
        fields: dict[str, Any] = {**options}
        call = self._options(fields.pop("timeout_s", None))
        with sendable("request"):
            request = inference_pb2.GenerateRequest(**fields)
        request.sampling.CopyFrom(sampling_to_message(params or SamplingParams()))
        put_prompt(request, prompt)
        return request, call

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """gRPC's errors become quire's."""
        try:
            yield
        except grpc.RpcError as error:
            raise from_grpc_error(error, self.target) from error


class Client(_Connection):
    """A connection to a quire server. Threads may share one; see `_Connection` for the arguments."""

    def _connect(self, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
        if credentials is None:
            return grpc.insecure_channel(self.target, _CHANNEL_OPTIONS)
        return grpc.secure_channel(self.target, credentials, _CHANNEL_OPTIONS)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """The complete answer to a prompt.

        Args:
            prompt: text, token ids or a Chat.
            params: None: the defaults.
            options: as RequestOptions says.

        Raises:
            QuireError: the error that the server met, or ReplicaUnavailable where there is no server.
        """
        request, call = self._request(prompt, params, options)
        with self._errors():
            return completion_from_message(self._inference.Generate(request, **call))

    def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[Event, None, None]:
        """The answer as it comes: Started, Deltas, Finished. Arguments and errors are those of `generate`.

        The request runs from this call on; closing the iterator ends it and frees what it held.
        """
        request, call = self._request(prompt, params, options)
        return self._events(self._inference.GenerateStream(request, **call))

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion:
        """The complete answer to a conversation, by the model's own chat template.

        Args:
            messages: ``{"role": "user", "content": "..."}`` each.
            params: None: the defaults.
            options: as ChatOptions and RequestOptions say.

        Raises:
            QuireError: as for `generate`; InvalidRequest where the model has no template, or it refuses the messages.
        """
        chat, request_options = _chat_of(messages, options)
        return self.generate(chat, params, **request_options)

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[Event, None, None]:
        """The answer as it comes: `chat` as `generate_stream` is `generate`."""
        chat, request_options = _chat_of(messages, options)
        return self.generate_stream(chat, params, **request_options)

    def _events(self, call: Any) -> Generator[Event, None, None]:
        try:
            with self._errors():
                for message in call:
                    yield event_from_message(message)
        finally:
            call.cancel()

    def abort(self, request_id: str, *, tenant: str = "") -> bool:
        """Ends a running request, whose caller gets RequestAborted; False where the tenant has none such."""
        request = inference_pb2.AbortRequest(request_id=request_id, tenant=tenant)
        with self._errors():
            return bool(self._inference.Abort(request, **self._options()).aborted)

    def models(self) -> list[inference_pb2.Model]:
        """What the server serves."""
        with self._errors():
            return list(
                self._inference.ListModels(inference_pb2.ListModelsRequest(), **self._options()).models
            )

    def status(self) -> list[admin_pb2.Replica]:
        """The state of each replica."""
        with self._errors():
            return list(self._admin.GetStatus(admin_pb2.GetStatusRequest(), **self._options()).replicas)

    def fleet(self) -> admin_pb2.GetStatusResponse:
        """The state of each replica, and of the fleet where there is one: what is deployed, and its nodes."""
        with self._errors():
            return self._admin.GetStatus(admin_pb2.GetStatusRequest(), **self._options())  # type: ignore[no-any-return]

    def deploy(self, deployment: Mapping[str, Any]) -> str:
        """Has a fleet serve a model, or serve it otherwise; where there are tokens, one of the tenant ``admin`` does.

        Args:
            deployment: a [[model]] table of a fleet file.

        Returns:
            The version: replicas of another one give way.
        """
        request = admin_pb2.DeployRequest(deployment_json=json.dumps(deployment))
        with self._errors():
            return str(self._admin.Deploy(request, **self._options()).version)

    def delete(self, model: str) -> None:
        """Has a fleet serve a model no longer."""
        with self._errors():
            self._admin.Delete(admin_pb2.DeleteRequest(model=model), **self._options())

    def drain(self, target: str) -> tuple[str, ...]:
        """Empties a replica, or all of a node, and ends it; returns the replicas."""
        with self._errors():
            response = self._admin.Drain(admin_pb2.DrainRequest(target=target), **self._options())
        return tuple(response.replica_ids)

    def is_ready(self) -> bool:
        """Whether the server is there and a token has come through all ranks."""
        try:
            return _is_serving(self._health.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S))
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Ends the calls that still run."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Connection):
    """Client for asyncio: the same methods, awaited. Create it in the event loop that uses it."""

    def _connect(self, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(self.target, _CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self.target, credentials, _CHANNEL_OPTIONS)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """See `Client.generate`."""
        request, call = self._request(prompt, params, options)
        with self._errors():
            return completion_from_message(await self._inference.Generate(request, **call))

    def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Event, None]:
        """See `Client.generate_stream`; ``aclose()`` ends the request."""
        request, call = self._request(prompt, params, options)
        return self._events(self._inference.GenerateStream(request, **call))

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion:
        """See `Client.chat`."""
        chat, request_options = _chat_of(messages, options)
        return await self.generate(chat, params, **request_options)

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[Event, None]:
        """See `Client.chat_stream`."""
        chat, request_options = _chat_of(messages, options)
        return self.generate_stream(chat, params, **request_options)

    async def _events(self, call: Any) -> AsyncGenerator[Event, None]:
        try:
            with self._errors():
                async for message in call:
                    yield event_from_message(message)
        finally:
            call.cancel()

    async def abort(self, request_id: str, *, tenant: str = "") -> bool:
        """See `Client.abort`."""
        request = inference_pb2.AbortRequest(request_id=request_id, tenant=tenant)
        with self._errors():
            return bool((await self._inference.Abort(request, **self._options())).aborted)

    async def models(self) -> list[inference_pb2.Model]:
        """See `Client.models`."""
        request = inference_pb2.ListModelsRequest()
        with self._errors():
            return list((await self._inference.ListModels(request, **self._options())).models)

    async def status(self) -> list[admin_pb2.Replica]:
        """See `Client.status`."""
        request = admin_pb2.GetStatusRequest()
        with self._errors():
            return list((await self._admin.GetStatus(request, **self._options())).replicas)

    async def fleet(self) -> admin_pb2.GetStatusResponse:
        """See `Client.fleet`."""
        with self._errors():
            return await self._admin.GetStatus(admin_pb2.GetStatusRequest(), **self._options())  # type: ignore[no-any-return]

    async def deploy(self, deployment: Mapping[str, Any]) -> str:
        """See `Client.deploy`."""
        request = admin_pb2.DeployRequest(deployment_json=json.dumps(deployment))
        with self._errors():
            return str((await self._admin.Deploy(request, **self._options())).version)

    async def delete(self, model: str) -> None:
        """See `Client.delete`."""
        with self._errors():
            await self._admin.Delete(admin_pb2.DeleteRequest(model=model), **self._options())

    async def drain(self, target: str) -> tuple[str, ...]:
        """See `Client.drain`."""
        with self._errors():
            response = await self._admin.Drain(admin_pb2.DrainRequest(target=target), **self._options())
        return tuple(response.replica_ids)

    async def is_ready(self) -> bool:
        """See `Client.is_ready`."""
        request = health_pb2.HealthCheckRequest()
        try:
            return _is_serving(await self._health.Check(request, timeout=HEALTH_TIMEOUT_S))
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        """Ends the calls that still run."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _chat_of(messages: Sequence[Message], options: ChatOptions) -> tuple[Chat, RequestOptions]:
    """The conversation, and what is left to be said of the request."""
    rest: Any = dict(options)
    chat = Chat(messages, rest.pop("continue_final_message", False), rest.pop("template_options", None) or {})
    return chat, rest


def _is_serving(answer: health_pb2.HealthCheckResponse) -> bool:
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _channel_credentials(tls_ca: Path) -> grpc.ChannelCredentials:
    try:
        return grpc.ssl_channel_credentials(tls_ca.read_bytes())
    except OSError as error:
        raise ConfigError(f"TLS authority {tls_ca} cannot be read: {error.strerror}") from error
