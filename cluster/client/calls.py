"""Calls of quire.v1, built alike for Client and AsyncClient, which differ only in how they wait for the responses."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ...proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ...proto.errors import ConfigError, QuireError, ServerUnreachable
from ...proto.faults import Fault
from ...proto.sampling import SamplingParams
from ..config.deployment import Deployment
from ..text.requests.chat import Chat, Tool
from ..text.requests.chat_messages import Message
from ..text.requests.outputs import RequestOutput, StreamEvent
from ..text.requests.request import Prompt
from .resume import ResumableCall, was_never_connected
from .servers import SelectedStub, Servers
from .wire.deployment_messages import deployment_to_message
from .wire.engine_messages import mode_to_message, read_tags
from .wire.grpc_status import from_grpc_error
from .wire.request_messages import as_invalid_request, sampling_to_message, set_prompt
from .wire.response_messages import event_from_message, output_from_message
from .wire.status import (
    BlockMapInfo,
    FleetEvent,
    FleetInfo,
    LoraInfo,
    ModelInfo,
    ModelLoad,
    ReplicaInfo,
    ServerInfo,
)
from .wire.status_messages import (
    block_map_from_message,
    fleet_from_message,
    load_from_message,
    model_from_message,
    server_info_from_message,
)
from .wire.status_messages import event_from_message as fleet_event_from_message
from .wire.tokens import bearer

DEFAULT_TIMEOUT_S = 600.0
ABORT_TIMEOUT_S = 2.0
HEALTH_TIMEOUT_S = 10.0

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    # Detects a server whose machine has vanished after 40 s; TCP alone would take hours.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Connect again soon after a connection broke, to resume streams within their server's window.
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name the longest time that a connection takes: TCP, TLS and the server's first frame.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

T = TypeVar("T")


class RequestOptions(TypedDict, total=False):
    """Options of a request beside its prompt and its sampling parameters, passed as keywords.

    Attributes:
        model: required only if the server serves several models.
        request_id: makes the call idempotent: a second call with the same id and content returns the output of the
            first. A random one by default.
        resumable: continue after a broken connection: the server runs on meanwhile, for some seconds. True by
            default; with False the request ends with its connection.
        tenant: for fair scheduling, limits and the prefix cache; not needed with a token that names a tenant.
        priority: higher values are scheduled first, if the server's policy is ``priority``; 0 by default.
        cache_salt: prefix caching shares KV only between requests of the tenant with the same salt.
        add_special_tokens: the model's tokenizer adds its special tokens to a text prompt; True by default.
        timeout_s: deadline of the call; None or absent means the client's default.
    """

    model: str
    request_id: str
    resumable: bool
    tenant: str
    priority: int
    cache_salt: str
    add_special_tokens: bool
    timeout_s: float | None


class ChatOptions(RequestOptions, total=False):
    """Options of a conversation, in addition to RequestOptions.

    Attributes:
        continue_final_message: continue the last message, which must be the assistant's, instead of a new one.
        template_options: further variables of the model's chat template by name, for example
            ``{"enable_thinking": False}``. Numbers arrive as floating-point numbers.
        tools: functions that the model may call, in the form of OpenAI's API.
        tool_choice: ``auto`` (the default), ``none``, ``required``, or an object that names a function or the allowed
            ones, in the form of OpenAI's API.
        parallel_tool_calls: allow several tool calls in one reply; True by default.
        documents: for templates of models that answer from documents.
        chat_template: a template for this conversation instead of the model's, if the server permits it.
        add_generation_prompt: end the prompt with the beginning of the assistant's message; True by default.
    """

    continue_final_message: bool
    template_options: Mapping[str, Any]
    tools: Sequence[Tool]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    documents: Sequence[Mapping[str, Any]]
    chat_template: str | None
    add_generation_prompt: bool


_CHAT_OPTIONS = ChatOptions.__annotations__.keys() - RequestOptions.__annotations__.keys()


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One remote procedure call; `read` converts its response, or each message of its stream."""

    method: Any
    request: Any
    options: Mapping[str, Any]
    read: Callable[[Any], T]

    def start(self) -> Any:
        """Send the request; return what the channel's kind returns: a response, an awaitable or an iterator."""
        return self.method(self.request, **self.options)


class Calls:
    """Builds the calls to the selected one of several servers.

    Args:
        servers: the selection.
        channels: one gRPC channel per server, all synchronous or all asynchronous.
        token: bearer token, if the servers require one.
        timeout_s: default deadline of a call; None means no deadline.
    """

    def __init__(
        self, servers: Servers, channels: Sequence[Any], token: str | None, timeout_s: float | None
    ) -> None:
        self._servers = servers
        self._metadata = () if token is None else (bearer(token),)
        self._timeout_s = timeout_s
        # The generated stubs accept both kinds of channel and return what the channel's kind returns.
        self._inference: Any = SelectedStub(servers, [inference_pb2_grpc.InferenceStub(c) for c in channels])
        self._admin: Any = SelectedStub(servers, [admin_pb2_grpc.AdminStub(c) for c in channels])
        self._health: Any = SelectedStub(servers, [health_pb2_grpc.HealthStub(c) for c in channels])

    def next_after(self, error: grpc.RpcError, num_tried: int) -> QuireError | None:
        """Return None if another server gets the call, which the selected one never received, or the call's error.

        Args:
            num_tried: servers that the call was sent to.
        """
        server = self._servers.selected
        failure = from_grpc_error(error, self._servers.target)
        if (
            num_tried >= len(self._servers)
            or not isinstance(failure, ServerUnreachable)
            or not was_never_connected(error)
        ):
            return failure
        self._servers.leave(server)
        return None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert gRPC's errors to quire's."""
        try:
            yield
        except grpc.RpcError as error:
            raise from_grpc_error(error, self._servers.target) from error

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None, options: RequestOptions
    ) -> Call[RequestOutput]:
        """Raises InvalidRequest for a value that no message can hold."""
        request, call_options = self._generate_request(prompt, sampling_params, options)
        text = prompt if isinstance(prompt, str) else None
        token_ids = _used_token_ids(prompt, sampling_params)
        return Call(
            self._inference.Generate,
            request,
            call_options,
            lambda response: output_from_message(response, text, token_ids),
        )

    def generate_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None, options: RequestOptions
    ) -> Call[StreamEvent]:
        """Raises InvalidRequest for a value that no message can hold."""
        request, call_options = self._generate_request(prompt, sampling_params, options)
        return Call(self._inference.GenerateStream, request, call_options, event_from_message)

    def abort(self, request_id: str, tenant: str, timeout_s: float | None = None) -> Call[bool]:
        request = inference_pb2.AbortRequest(request_id=request_id, tenant=tenant)
        options = self._options(timeout_s)
        return Call(self._inference.Abort, request, options, lambda response: bool(response.aborted))

    def resumable(self, call: Call[T]) -> ResumableCall[T]:
        """Return a generation as a call that continues after its connection broke."""
        return ResumableCall(call, self._servers)

    def abort_left(self, left: ResumableCall[Any]) -> Call[bool] | None:
        """Return the call that ends a request of which the caller wants no more; None if it ends by itself."""
        request = left.request
        return self.abort(request.request_id, request.tenant, ABORT_TIMEOUT_S) if left.must_abort else None

    def models(self) -> Call[list[ModelInfo]]:
        return Call(
            self._inference.ListModels,
            inference_pb2.ListModelsRequest(),
            self._options(),
            lambda response: [model_from_message(model) for model in response.models],
        )

    def status(self) -> Call[list[ReplicaInfo]]:
        return Call(
            self._admin.GetStatus,
            admin_pb2.GetStatusRequest(),
            self._options(),
            lambda response: list(fleet_from_message(response).replicas),
        )

    def fleet(self, *, cached: bool, timeout_s: float | None) -> Call[FleetInfo]:
        request = admin_pb2.GetStatusRequest(cached=cached)
        return Call(self._admin.GetStatus, request, self._options(timeout_s), fleet_from_message)

    def block_map(self, replica_id: str, timeout_s: float | None) -> Call[BlockMapInfo]:
        request = admin_pb2.GetBlockMapRequest(replica_id=replica_id)
        return Call(self._admin.GetBlockMap, request, self._options(timeout_s), block_map_from_message)

    def deploy(self, deployment: Deployment) -> Call[str]:
        request = admin_pb2.DeployRequest(deployment=deployment_to_message(deployment))
        return Call(self._admin.Deploy, request, self._options(), lambda response: str(response.version))

    def delete(self, model: str) -> Call[None]:
        request = admin_pb2.DeleteRequest(model=model)
        return Call(self._admin.Delete, request, self._options(), lambda response: None)

    def drain(self, target: str) -> Call[tuple[str, ...]]:
        request = admin_pb2.DrainRequest(target=target)
        return Call(self._admin.Drain, request, self._options(), lambda response: tuple(response.replica_ids))

    def undrain(self, target: str) -> Call[tuple[str, ...]]:
        request = admin_pb2.UndrainRequest(target=target)
        return Call(
            self._admin.Undrain, request, self._options(), lambda response: tuple(response.replica_ids)
        )

    def set_scale(
        self, model: str, min_replicas: int | None, max_replicas: int | None
    ) -> Call[tuple[int, int]]:
        with as_invalid_request("scale"):
            request = admin_pb2.SetScaleRequest(
                model=model, min_replicas=min_replicas, max_replicas=max_replicas
            )
        return Call(
            self._admin.SetScale,
            request,
            self._options(),
            lambda response: (int(response.min_replicas), int(response.max_replicas)),
        )

    def flush_cache(self, model: str) -> Call[tuple[str, ...]]:
        request = admin_pb2.FlushCacheRequest(model=model)
        return Call(
            self._admin.FlushCache, request, self._options(), lambda response: tuple(response.replica_ids)
        )

    def load_lora(self, name: str, path: str, model: str, *, replace: bool) -> Call[None]:
        with as_invalid_request("adapter"):
            request = admin_pb2.LoadLoraRequest(name=name, path=path, model=model, replace=replace)
        return Call(self._admin.LoadLora, request, self._options(), lambda response: None)

    def unload_lora(self, name: str) -> Call[None]:
        request = admin_pb2.UnloadLoraRequest(name=name)
        return Call(self._admin.UnloadLora, request, self._options(), lambda response: None)

    def loras(self) -> Call[list[LoraInfo]]:
        return Call(
            self._admin.ListLoras,
            admin_pb2.ListLorasRequest(),
            self._options(),
            lambda response: [LoraInfo(each.name, each.path, each.model) for each in response.adapters],
        )

    def sleep(self, level: int, mode: str, model: str, timeout_s: float | None) -> Call[None]:
        with as_invalid_request("level"):
            request = admin_pb2.SleepRequest(model=model, level=level, mode=mode_to_message(mode))
        return Call(self._admin.Sleep, request, self._options(timeout_s), lambda response: None)

    def wake_up(self, tags: Iterable[str], model: str, timeout_s: float | None) -> Call[None]:
        request = admin_pb2.WakeUpRequest(model=model, tags=read_tags(tags))
        return Call(self._admin.WakeUp, request, self._options(timeout_s), lambda response: None)

    def pause(self, mode: str, model: str, timeout_s: float | None) -> Call[None]:
        request = admin_pb2.PauseRequest(model=model, mode=mode_to_message(mode))
        return Call(self._admin.Pause, request, self._options(timeout_s), lambda response: None)

    def resume(self, model: str, timeout_s: float | None) -> Call[None]:
        request = admin_pb2.ResumeRequest(model=model)
        return Call(self._admin.Resume, request, self._options(timeout_s), lambda response: None)

    def update_weights(
        self, path: str, version: str, mode: str, model: str, timeout_s: float | None
    ) -> Call[None]:
        with as_invalid_request("path"):
            request = admin_pb2.UpdateWeightsRequest(
                model=model, path=path, version=version, mode=mode_to_message(mode)
            )
        return Call(self._admin.UpdateWeights, request, self._options(timeout_s), lambda response: None)

    def inject_fault(self, fault: Fault, rank: int | None, replica_id: str) -> Call[tuple[str, int]]:
        with as_invalid_request("fault"):
            request = admin_pb2.InjectFaultRequest(
                replica_id=replica_id,
                rank=rank,
                kind=f"FAULT_KIND_{fault.kind.name}",
                delay_s=fault.delay_s,
                duration_s=fault.duration_s,
                token_id=fault.token_id,
            )
        return Call(
            self._admin.InjectFault,
            request,
            self._options(),
            lambda response: (str(response.replica_id), int(response.pid)),
        )

    def load(self) -> Call[list[ModelLoad]]:
        return Call(
            self._admin.GetLoad,
            admin_pb2.GetLoadRequest(),
            self._options(),
            lambda response: [load_from_message(model) for model in response.models],
        )

    def watch_events(self) -> Call[FleetEvent]:
        options = {**self._options(), "timeout": None}
        return Call(
            self._admin.WatchEvents, admin_pb2.WatchEventsRequest(), options, fleet_event_from_message
        )

    def server_info(self) -> Call[ServerInfo]:
        request = inference_pb2.GetServerInfoRequest()
        return Call(self._inference.GetServerInfo, request, self._options(), server_info_from_message)

    def tokenize(self, prompt: str | Chat, model: str, add_special_tokens: bool) -> Call[list[int]]:
        request = inference_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
        set_prompt(request, prompt)
        return Call(
            self._inference.Tokenize, request, self._options(), lambda response: list(response.token_ids)
        )

    def detokenize(self, token_ids: Sequence[int], model: str, skip_special_tokens: bool) -> Call[str]:
        with as_invalid_request("token_ids"):
            request = inference_pb2.DetokenizeRequest(
                model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
            )
        return Call(self._inference.Detokenize, request, self._options(), lambda response: str(response.text))

    def is_ready(self) -> Call[bool]:
        return Call(
            self._health.Check,
            health_pb2.HealthCheckRequest(),
            {"timeout": HEALTH_TIMEOUT_S},
            lambda response: bool(response.status == health_pb2.HealthCheckResponse.SERVING),
        )

    def _options(self, timeout_s: float | None = None) -> dict[str, Any]:
        return {"metadata": self._metadata, "timeout": self._timeout_s if timeout_s is None else timeout_s}

    def _generate_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None, options: RequestOptions
    ) -> tuple[inference_pb2.GenerateRequest, dict[str, Any]]:
        """Return the message and the call's options."""
        fields: dict[str, Any] = {"resumable": True, **options}
        fields["request_id"] = fields.get("request_id") or uuid.uuid4().hex
        call_options = self._options(fields.pop("timeout_s", None))
        with as_invalid_request("request"):
            request = inference_pb2.GenerateRequest(**fields)
        request.sampling.CopyFrom(sampling_to_message(sampling_params or SamplingParams()))
        set_prompt(request, prompt)
        return request, call_options


def split_chat(messages: Sequence[Message], options: ChatOptions) -> tuple[Chat, RequestOptions]:
    """Return the conversation as a prompt, and the options of the request."""
    rest: Any = dict(options)
    of_chat = {name: rest.pop(name) for name in _CHAT_OPTIONS & rest.keys()}
    return Chat(messages, **of_chat), rest


def load_tls(ca: str | Path, cert: str | Path | None) -> grpc.ChannelCredentials:
    """Raises ConfigError if a file cannot be read."""
    authority = _read(ca, "TLS authority")
    pair = None if cert is None else _read(cert, "client certificate")
    return grpc.ssl_channel_credentials(authority, private_key=pair, certificate_chain=pair)


def _read(path: str | Path, description: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{description} {path} cannot be read: {error.strerror}") from error


def _used_token_ids(prompt: Prompt, sampling_params: SamplingParams | None) -> list[int] | None:
    """Return the tokens that the server uses of a prompt of token ids; None for other prompts."""
    if isinstance(prompt, str | Chat):
        return None
    num_used = None if sampling_params is None else sampling_params.truncate_prompt_tokens
    token_ids = [int(token_id) for token_id in prompt]
    return token_ids if num_used is None else token_ids[-num_used:]
