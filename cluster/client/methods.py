"""The methods of Client and AsyncClient: each one builds the call of its arguments, for which the client waits."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ...proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from ...proto.errors import ConfigError
from ...proto.faults import Fault
from ...proto.sampling import SamplingParams
from ..config.deployment import Deployment
from ..text.requests.chat import Chat, Tool
from ..text.requests.chat_messages import Message
from ..text.requests.engine_commands import read_tags
from ..text.requests.outputs import RequestOutput, StreamEvent
from ..text.requests.request import Prompt
from .call import Call, ResumableCall, Servers, by_size, split_target
from .waiting import stream, unary
from .wire.admin_messages import deployment_to_message, fleet_event_from_message, mode_to_message
from .wire.message_fields import from_message
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
        image_settings: settings of the model's image processor for this conversation.
    """

    continue_final_message: bool
    template_options: Mapping[str, Any]
    tools: Sequence[Tool]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    documents: Sequence[Mapping[str, Any]]
    chat_template: str | None
    add_generation_prompt: bool
    image_settings: Mapping[str, Any]


_CHAT_OPTIONS = ChatOptions.__annotations__.keys() - RequestOptions.__annotations__.keys()


class Methods:
    """Connection and methods of both clients. Each method is declared once, by the call that it waits for."""

    _grpc: ClassVar[Any]  # the module that opens channels: grpc or grpc.aio

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.target = target
        self._servers = Servers(split_target(target))
        self._metadata = () if token is None else (bearer(token),)
        self._timeout_s = timeout_s
        credentials = None if tls_ca is None else load_tls(tls_ca, tls_cert)
        self._channels: list[Any] = [
            self._grpc.insecure_channel(each, CHANNEL_OPTIONS)
            if credentials is None
            else self._grpc.secure_channel(each, credentials, CHANNEL_OPTIONS)
            for each in self._servers.targets
        ]
        # The generated stubs accept both kinds of channel and return what the channel's kind returns.
        self._inference = _Stubs(inference_pb2_grpc.InferenceStub, self._channels)
        self._admin = _Stubs(admin_pb2_grpc.AdminStub, self._channels)
        self._health = _Stubs(health_pb2_grpc.HealthStub, self._channels)

    @unary
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Call[RequestOutput]:
        """Return the completions of a prompt.

        Args:
            prompt: text, token ids or a Chat.
            sampling_params: None means the defaults.
            options: see RequestOptions.

        Raises:
            QuireError: the server's error, or ReplicaUnavailable if the server cannot be reached.
        """
        return self._generate(prompt, sampling_params, options)

    @stream
    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Call[StreamEvent]:
        """Start a request and return its events. Arguments and errors are those of `generate`.

        The events are one RequestStarted, then CompletionDeltas (and PromptLogprobsDeltas if requested) and one
        CompletionFinished per completion. Closing the generator aborts the request. If the connection breaks, the
        stream continues over another one, without loss or repetition, unless `resumable` is False.
        """
        return self._generate_stream(prompt, sampling_params, options)

    @unary
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Call[RequestOutput]:
        """Return the completions of a conversation, rendered by the model's chat template.

        Args:
            messages: ``{"role": "user", "content": "..."}`` each. A content may also be a list of parts: texts,
                ``{"type": "text", "text": "..."}``, and images, ``{"type": "image", "image": ...}`` with the bytes of
                a file, a URL or a PIL.Image.
            sampling_params: None means the defaults.
            options: see ChatOptions and RequestOptions.

        Raises:
            QuireError: see `generate`; InvalidRequest if the model has no template or it rejects the messages.
        """
        chat, request_options = split_chat(messages, options)
        return self._generate(chat, sampling_params, request_options)

    @stream
    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Call[StreamEvent]:
        """Start a conversation's request and return its events. See `chat` and `generate_stream`."""
        chat, request_options = split_chat(messages, options)
        return self._generate_stream(chat, sampling_params, request_options)

    @unary
    def abort(self, request_id: str, *, tenant: str = "") -> Call[bool]:
        """End a running request, its call raises RequestAborted. Returns False if the tenant has no such request."""
        return self._abort(request_id, tenant)

    @unary
    def models(self) -> Call[list[ModelInfo]]:
        """Return the models that the server serves."""
        return self._call(
            self._inference.ListModels,
            inference_pb2.ListModelsRequest(),
            lambda response: [from_message(ModelInfo, model) for model in response.models],
        )

    @unary
    def status(self) -> Call[list[ReplicaInfo]]:
        """Return the state of each replica."""
        return self._call(
            self._admin.GetStatus,
            admin_pb2.GetStatusRequest(),
            lambda response: list(from_message(FleetInfo, response).replicas),
        )

    @unary
    def fleet(self, *, cached: bool = False, timeout_s: float | None = None) -> Call[FleetInfo]:
        """Return the state of each replica, the traffic, and the fleet's deployments and nodes if there is a fleet.

        Args:
            cached: return the latest known state of each replica at once instead of asking the replicas.
        """
        request = admin_pb2.GetStatusRequest(cached=cached)
        return self._call(self._admin.GetStatus, request, partial(from_message, FleetInfo), timeout_s)

    @unary
    def block_map(self, replica_id: str, *, timeout_s: float | None = None) -> Call[BlockMapInfo]:
        """Return which sequences hold the KV blocks of a replica."""
        request = admin_pb2.GetBlockMapRequest(replica_id=replica_id)
        return self._call(self._admin.GetBlockMap, request, partial(from_message, BlockMapInfo), timeout_s)

    @unary
    def deploy(self, deployment: Deployment) -> Call[str]:
        """Add or change a deployment of a fleet; needs a token with the role ``operator`` if the server has tokens.

        Returns:
            The version of the deployment. Replicas of other versions are replaced.
        """
        request = admin_pb2.DeployRequest(deployment=deployment_to_message(deployment))
        return self._call(self._admin.Deploy, request, lambda response: str(response.version))

    @unary
    def delete(self, model: str) -> Call[None]:
        """Remove the deployment of a model from a fleet."""
        return self._call(self._admin.Delete, admin_pb2.DeleteRequest(model=model), _nothing)

    @unary
    def drain(self, target: str) -> Call[tuple[str, ...]]:
        """Drain and end a replica, or all replicas of a node. Returns the ids of the replicas."""
        return self._call(self._admin.Drain, admin_pb2.DrainRequest(target=target), _replica_ids)

    @unary
    def undrain(self, target: str) -> Call[tuple[str, ...]]:
        """Take back the drain of a replica that waits for another one to take over. Returns its id."""
        return self._call(self._admin.Undrain, admin_pb2.UndrainRequest(target=target), _replica_ids)

    @unary
    def set_scale(
        self, model: str, min_replicas: int | None = None, max_replicas: int | None = None
    ) -> Call[tuple[int, int]]:
        """Change how many replicas a deployment may have; None keeps a bound. Returns both."""
        with as_invalid_request("scale"):
            request = admin_pb2.SetScaleRequest(
                model=model, min_replicas=min_replicas, max_replicas=max_replicas
            )
        return self._call(
            self._admin.SetScale,
            request,
            lambda response: (int(response.min_replicas), int(response.max_replicas)),
        )

    @unary
    def flush_cache(self, model: str = "") -> Call[tuple[str, ...]]:
        """Empty the prefix caches of a model's replicas. Returns the ids of the replicas."""
        return self._call(self._admin.FlushCache, admin_pb2.FlushCacheRequest(model=model), _replica_ids)

    @unary
    def load_lora(self, name: str, path: str, *, model: str = "", replace: bool = False) -> Call[None]:
        """Have all replicas of a model read a LoRA adapter, which requests name as their model from then on.

        Args:
            path: its directory, on every node.
            model: the model that it changes; not needed if the server serves one.
            replace: replace an adapter of the same name.

        Raises:
            LoraLoadError: a replica cannot read it. It is taken back on all.
        """
        with as_invalid_request("adapter"):
            request = admin_pb2.LoadLoraRequest(name=name, path=path, model=model, replace=replace)
        return self._call(self._admin.LoadLora, request, _nothing)

    @unary
    def unload_lora(self, name: str) -> Call[None]:
        """Refuse new requests for an adapter. Requests that run end in order."""
        return self._call(self._admin.UnloadLora, admin_pb2.UnloadLoraRequest(name=name), _nothing)

    @unary
    def loras(self) -> Call[list[LoraInfo]]:
        """Return the LoRA adapters that the server knows."""
        return self._call(
            self._admin.ListLoras,
            admin_pb2.ListLorasRequest(),
            lambda response: [LoraInfo(each.name, each.path, each.model) for each in response.adapters],
        )

    @unary
    def sleep(
        self, level: int = 1, *, mode: str = "keep", model: str = "", timeout_s: float | None = None
    ) -> Call[None]:
        """Free the memory of weights and KV cache on all replicas of a model; requests are refused until `wake_up`.

        Args:
            level: 1, `wake_up` reads the same weights again. 2, they are discarded: `update_weights` must name
                others first.
            mode: ``keep`` lets running requests continue afterwards, ``wait`` lets them finish first, ``abort`` ends
                them with RequestAborted.
            model: not needed if the server serves one.

        Raises:
            InvalidRequest: a value is not allowed.
        """
        with as_invalid_request("level"):
            request = admin_pb2.SleepRequest(model=model, level=level, mode=mode_to_message(mode))
        return self._call(self._admin.Sleep, request, _nothing, timeout_s)

    @unary
    def wake_up(
        self, tags: Iterable[str] = (), *, model: str = "", timeout_s: float | None = None
    ) -> Call[None]:
        """End `sleep`.

        Args:
            tags: what wakes, of ``weights`` and ``kv_cache``; all if there are none. Requests are refused until all
                is awake. Weights that were discarded are loaded by `update_weights`.

        Raises:
            InvalidRequest: a tag is unknown, the weights were discarded, or a rank lacks memory; it sleeps on.
        """
        request = admin_pb2.WakeUpRequest(model=model, tags=read_tags(tags))
        return self._call(self._admin.WakeUp, request, _nothing, timeout_s)

    @unary
    def pause(self, *, mode: str = "keep", model: str = "", timeout_s: float | None = None) -> Call[None]:
        """Hold the steps of all replicas of a model; new requests wait until `resume`. `mode` is that of `sleep`."""
        request = admin_pb2.PauseRequest(model=model, mode=mode_to_message(mode))
        return self._call(self._admin.Pause, request, _nothing, timeout_s)

    @unary
    def resume(self, *, model: str = "", timeout_s: float | None = None) -> Call[None]:
        """End `pause`."""
        return self._call(self._admin.Resume, admin_pb2.ResumeRequest(model=model), _nothing, timeout_s)

    @unary
    def update_weights(
        self,
        path: str,
        *,
        version: str,
        mode: str = "keep",
        model: str = "",
        timeout_s: float | None = None,
    ) -> Call[None]:
        """Replace the weights of all replicas of a model, as after a training step.

        Args:
            path: a directory of safetensors files with the tensors of the model, on every node of the ranks.
            version: a new name of the weights, which outputs report as `weights_version`.
            mode: the same as for `sleep`.

        Raises:
            InvalidRequest: tensors are missing or have other shapes or types; the weights have not changed.
        """
        with as_invalid_request("path"):
            request = admin_pb2.UpdateWeightsRequest(
                model=model, path=path, version=version, mode=mode_to_message(mode)
            )
        return self._call(self._admin.UpdateWeights, request, _nothing, timeout_s)

    @unary
    def inject_fault(
        self, fault: Fault, *, rank: int | None = None, replica_id: str = ""
    ) -> Call[tuple[str, int]]:
        """Cause a fault in a rank of a replica, or in its scheduler; the server must permit it.

        Returns:
            The replica's id, and the process id on its host.
        """
        with as_invalid_request("fault"):
            request = admin_pb2.InjectFaultRequest(
                replica_id=replica_id,
                rank=rank,
                kind=f"FAULT_KIND_{fault.kind.name}",
                delay_s=fault.delay_s,
                duration_s=fault.duration_s,
                token_id=fault.token_id,
            )
        return self._call(
            self._admin.InjectFault,
            request,
            lambda response: (str(response.replica_id), int(response.pid)),
        )

    @unary
    def load(self) -> Call[list[ModelLoad]]:
        """Return the load of each model."""
        return self._call(
            self._admin.GetLoad,
            admin_pb2.GetLoadRequest(),
            lambda response: [from_message(ModelLoad, model) for model in response.models],
        )

    @stream
    def watch_events(self) -> Call[FleetEvent]:
        """Return the fleet's changes as they happen, after an event for each present object. Close it to end it."""
        options = {**self._options(), "timeout": None}
        request = admin_pb2.WatchEventsRequest()
        return Call(self._servers, self._admin.WatchEvents, request, options, fleet_event_from_message)

    @unary
    def server_info(self) -> Call[ServerInfo]:
        """Return the version, the models and the limits of the server."""
        request = inference_pb2.GetServerInfoRequest()
        return self._call(self._inference.GetServerInfo, request, partial(from_message, ServerInfo))

    @unary
    def tokenize(
        self, prompt: str | Chat, *, model: str = "", add_special_tokens: bool = True
    ) -> Call[list[int]]:
        """Return the token ids of a text or a conversation, as a request would have them."""
        request = inference_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
        set_prompt(request, prompt)
        return self._call(self._inference.Tokenize, request, lambda response: list(response.token_ids))

    @unary
    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False
    ) -> Call[str]:
        """Return the text of token ids."""
        with as_invalid_request("token_ids"):
            request = inference_pb2.DetokenizeRequest(
                model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
            )
        return self._call(self._inference.Detokenize, request, lambda response: str(response.text))

    def _check_health(self) -> Call[bool]:
        return Call(
            self._servers,
            self._health.Check,
            health_pb2.HealthCheckRequest(),
            {"timeout": HEALTH_TIMEOUT_S},
            lambda response: bool(response.status == health_pb2.HealthCheckResponse.SERVING),
        )

    def _call(
        self, methods: Sequence[Any], request: Any, read: Callable[[Any], T], timeout_s: float | None = None
    ) -> Call[T]:
        return Call(self._servers, methods, request, self._options(timeout_s), read)

    def _abort(self, request_id: str, tenant: str, timeout_s: float | None = None) -> Call[bool]:
        request = inference_pb2.AbortRequest(request_id=request_id, tenant=tenant)
        return self._call(self._inference.Abort, request, lambda response: bool(response.aborted), timeout_s)

    def _generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None, options: RequestOptions
    ) -> Call[RequestOutput]:
        text = prompt if isinstance(prompt, str) else None
        token_ids = _used_token_ids(prompt, sampling_params)

        def read(response: inference_pb2.GenerateResponse) -> RequestOutput:
            return output_from_message(response, text, token_ids)

        stubs = self._inference
        methods = [*map(by_size, stubs.Generate, stubs.GenerateInPieces)]
        return self._resumable(methods, prompt, sampling_params, options, read)

    def _generate_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None, options: RequestOptions
    ) -> Call[StreamEvent]:
        stubs = self._inference
        methods = [*map(by_size, stubs.GenerateStream, stubs.GenerateStreamInPieces)]
        return self._resumable(methods, prompt, sampling_params, options, event_from_message)

    def _resumable(
        self,
        methods: Sequence[Any],
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        options: RequestOptions,
        read: Callable[[Any], T],
    ) -> Call[T]:
        """Raises InvalidRequest for a value that no message can hold."""
        fields: dict[str, Any] = {"resumable": True, **options}
        fields["request_id"] = fields.get("request_id") or uuid.uuid4().hex
        call_options = self._options(fields.pop("timeout_s", None))
        with as_invalid_request("request"):
            request = inference_pb2.GenerateRequest(**fields)
        request.sampling.CopyFrom(sampling_to_message(sampling_params or SamplingParams()))
        set_prompt(request, prompt)
        abort = self._abort(request.request_id, request.tenant, ABORT_TIMEOUT_S)
        return ResumableCall(self._servers, methods, request, call_options, read, abort=abort)

    def _options(self, timeout_s: float | None = None) -> dict[str, Any]:
        return {"metadata": self._metadata, "timeout": self._timeout_s if timeout_s is None else timeout_s}


class _Stubs:
    """gRPC stubs of one service; each attribute has the method of that name for each server."""

    def __init__(self, kind: Callable[[Any], Any], channels: Sequence[Any]) -> None:
        self._stubs = [kind(channel) for channel in channels]

    def __getattr__(self, name: str) -> list[Any]:
        return [getattr(stub, name) for stub in self._stubs]


def _nothing(response: object) -> None:
    pass


def _replica_ids(response: Any) -> tuple[str, ...]:
    return tuple(response.replica_ids)


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
    if num_used is not None and num_used < 0:  # the server knows its context
        return None
    token_ids = [int(token_id) for token_id in prompt]
    return token_ids if num_used is None else token_ids[-num_used:]
