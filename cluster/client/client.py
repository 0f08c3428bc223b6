"""Client: quire.v1 for programs that block while they wait."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from ...proto.errors import QuireError
from ...proto.faults import Fault
from ...proto.sampling import SamplingParams
from ..config.deployment import Deployment
from ..text.requests.chat import Chat
from ..text.requests.chat_messages import Message
from ..text.requests.outputs import RequestOutput, StreamEvent
from ..text.requests.request import Prompt
from .calls import (
    CHANNEL_OPTIONS,
    DEFAULT_TIMEOUT_S,
    Call,
    Calls,
    ChatOptions,
    RequestOptions,
    load_tls,
    split_chat,
)
from .resume import ResumableCall
from .servers import Servers, split_target
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

T = TypeVar("T")


class Client:
    """Connection to a quire server. Threads may share one client.

    Args:
        target: the server's ``HOST:PORT``, or those of several gateways of one fleet, separated by commas. The next
            one is called when one cannot be reached; streams continue there.
        token: bearer token, if the server requires one.
        tls_ca: PEM file of the authority that signed the server's certificate; None connects without TLS.
        tls_cert: PEM file of the client's own certificate and its key, if the server asks for one.
        timeout_s: default deadline of a call; None means no deadline.

    Raises:
        ConfigError: the authority's file cannot be read.
    """

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
        servers = Servers(split_target(target))
        credentials = None if tls_ca is None else load_tls(tls_ca, tls_cert)
        self._channels = [
            grpc.insecure_channel(each, CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(each, credentials, CHANNEL_OPTIONS)
            for each in servers.targets
        ]
        self._calls = Calls(servers, self._channels, token, timeout_s)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Return the completions of a prompt.

        Args:
            prompt: text, token ids or a Chat.
            sampling_params: None means the defaults.
            options: see RequestOptions.

        Raises:
            QuireError: the server's error, or ReplicaUnavailable if the server cannot be reached.
        """
        return self._wait_resumed(
            self._calls.resumable(self._calls.generate(prompt, sampling_params, options))
        )

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[StreamEvent, None, None]:
        """Start a request and return its events. Arguments and errors are those of `generate`.

        The events are one RequestStarted, then CompletionDeltas (and PromptLogprobsDeltas if requested) and one
        CompletionFinished per completion. Closing the generator aborts the request. If the connection breaks, the
        stream continues over another one, without loss or repetition, unless `resumable` is False.
        """
        call = self._calls.resumable(self._calls.generate_stream(prompt, sampling_params, options))
        return self._read_events(call, call.start())

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput:
        """Return the completions of a conversation, rendered by the model's chat template.

        Args:
            messages: ``{"role": "user", "content": "..."}`` each.
            sampling_params: None means the defaults.
            options: see ChatOptions and RequestOptions.

        Raises:
            QuireError: see `generate`; InvalidRequest if the model has no template or it rejects the messages.
        """
        chat, request_options = split_chat(messages, options)
        return self.generate(chat, sampling_params, **request_options)

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[StreamEvent, None, None]:
        """Start a conversation's request and return its events. See `chat` and `generate_stream`."""
        chat, request_options = split_chat(messages, options)
        return self.generate_stream(chat, sampling_params, **request_options)

    def abort(self, request_id: str, *, tenant: str = "") -> bool:
        """End a running request, its call raises RequestAborted. Returns False if the tenant has no such request."""
        return self._wait(self._calls.abort(request_id, tenant))

    def models(self) -> list[ModelInfo]:
        """Return the models that the server serves."""
        return self._wait(self._calls.models())

    def status(self) -> list[ReplicaInfo]:
        """Return the state of each replica."""
        return self._wait(self._calls.status())

    def fleet(self, *, cached: bool = False, timeout_s: float | None = None) -> FleetInfo:
        """Return the state of each replica, the traffic, and the fleet's deployments and nodes if there is a fleet.

        Args:
            cached: return the latest known state of each replica at once instead of asking the replicas.
        """
        return self._wait(self._calls.fleet(cached=cached, timeout_s=timeout_s))

    def block_map(self, replica_id: str, *, timeout_s: float | None = None) -> BlockMapInfo:
        """Return which sequences hold the KV blocks of a replica."""
        return self._wait(self._calls.block_map(replica_id, timeout_s))

    def deploy(self, deployment: Deployment) -> str:
        """Add or change a deployment of a fleet; needs a token with the role ``operator`` if the server has tokens.

        Returns:
            The version of the deployment. Replicas of other versions are replaced.
        """
        return self._wait(self._calls.deploy(deployment))

    def delete(self, model: str) -> None:
        """Remove the deployment of a model from a fleet."""
        self._wait(self._calls.delete(model))

    def drain(self, target: str) -> tuple[str, ...]:
        """Drain and end a replica, or all replicas of a node. Returns the ids of the replicas."""
        return self._wait(self._calls.drain(target))

    def undrain(self, target: str) -> tuple[str, ...]:
        """Take back the drain of a replica that waits for another one to take over. Returns its id."""
        return self._wait(self._calls.undrain(target))

    def set_scale(
        self, model: str, min_replicas: int | None = None, max_replicas: int | None = None
    ) -> tuple[int, int]:
        """Change how many replicas a deployment may have; None keeps a bound. Returns both."""
        return self._wait(self._calls.set_scale(model, min_replicas, max_replicas))

    def flush_cache(self, model: str = "") -> tuple[str, ...]:
        """Empty the prefix caches of a model's replicas. Returns the ids of the replicas."""
        return self._wait(self._calls.flush_cache(model))

    def load_lora(self, name: str, path: str, *, model: str = "", replace: bool = False) -> None:
        """Have all replicas of a model read a LoRA adapter, which requests name as their model from then on.

        Args:
            path: its directory, on every node.
            model: the model that it changes; not needed if the server serves one.
            replace: replace an adapter of the same name.

        Raises:
            LoraLoadError: a replica cannot read it. It is taken back on all.
        """
        self._wait(self._calls.load_lora(name, path, model, replace=replace))

    def unload_lora(self, name: str) -> None:
        """Refuse new requests for an adapter. Requests that run end in order."""
        self._wait(self._calls.unload_lora(name))

    def loras(self) -> list[LoraInfo]:
        """Return the LoRA adapters that the server knows."""
        return self._wait(self._calls.loras())

    def sleep(
        self, level: int = 1, *, mode: str = "keep", model: str = "", timeout_s: float | None = None
    ) -> None:
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
        self._wait(self._calls.sleep(level, mode, model, timeout_s))

    def wake_up(self, tags: Iterable[str] = (), *, model: str = "", timeout_s: float | None = None) -> None:
        """End `sleep`.

        Args:
            tags: what wakes, of ``weights`` and ``kv_cache``; all if there are none. Requests are refused until all
                is awake. Weights that were discarded are loaded by `update_weights`.

        Raises:
            InvalidRequest: a tag is unknown, the weights were discarded, or a rank lacks memory; it sleeps on.
        """
        self._wait(self._calls.wake_up(tags, model, timeout_s))

    def pause(self, *, mode: str = "keep", model: str = "", timeout_s: float | None = None) -> None:
        """Hold the steps of all replicas of a model; new requests wait until `resume`. `mode` is that of `sleep`."""
        self._wait(self._calls.pause(mode, model, timeout_s))

    def resume(self, *, model: str = "", timeout_s: float | None = None) -> None:
        """End `pause`."""
        self._wait(self._calls.resume(model, timeout_s))

    def update_weights(
        self,
        path: str,
        *,
        version: str,
        mode: str = "keep",
        model: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Replace the weights of all replicas of a model, as after a training step.

        Args:
            path: a directory of safetensors files with the tensors of the model, on every node of the ranks.
            version: a new name of the weights, which outputs report as `weights_version`.
            mode: as for `sleep`.

        Raises:
            InvalidRequest: tensors are missing or have other shapes or types; the weights have not changed.
        """
        self._wait(self._calls.update_weights(path, version, mode, model, timeout_s))

    def inject_fault(self, fault: Fault, *, rank: int | None = None, replica_id: str = "") -> tuple[str, int]:
        """Cause a fault in a rank of a replica, or in its scheduler; the server must permit it.

        Returns:
            The replica's id, and the process id on its host.
        """
        return self._wait(self._calls.inject_fault(fault, rank, replica_id))

    def load(self) -> list[ModelLoad]:
        """Return the load of each model."""
        return self._wait(self._calls.load())

    def watch_events(self) -> Generator[FleetEvent, None, None]:
        """Return the fleet's changes as they happen, after an event for each present object. Close it to end it."""
        call = self._calls.watch_events()
        return self._read_fleet_events(call, call.start())

    def server_info(self) -> ServerInfo:
        """Return the version, the models and the limits of the server."""
        return self._wait(self._calls.server_info())

    def tokenize(self, prompt: str | Chat, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text or a conversation, as a request would have them."""
        return self._wait(self._calls.tokenize(prompt, model, add_special_tokens))

    def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False
    ) -> str:
        """Return the text of token ids."""
        return self._wait(self._calls.detokenize(token_ids, model, skip_special_tokens))

    def is_ready(self) -> bool:
        """Return whether the server can be reached and serves a model."""
        call = self._calls.is_ready()
        try:
            return call.read(call.start())
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Close the connection. Running calls are canceled."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, call: Call[T]) -> T:
        for num_tried in itertools.count(1):
            try:
                return call.read(call.start())
            except grpc.RpcError as error:
                failure = self._calls.next_after(error, num_tried)
                if failure is not None:
                    raise failure from error
        raise AssertionError("the loop ends with a response or an error")

    def _read_fleet_events(self, call: Call[FleetEvent], stream: Any) -> Generator[FleetEvent, None, None]:
        try:
            with self._calls.errors():
                for message in stream:
                    yield call.read(message)
        finally:
            stream.cancel()

    def _wait_resumed(self, call: ResumableCall[T]) -> T:
        with self._abort_if_left(call):
            while True:
                try:
                    return call.read(call.start())
                except grpc.RpcError as error:
                    delay_s = call.delay_after(error)
                time.sleep(delay_s)

    def _read_events(
        self, call: ResumableCall[StreamEvent], stream: Any
    ) -> Generator[StreamEvent, None, None]:
        with self._abort_if_left(call):
            while True:
                try:
                    for message in stream:
                        yield call.read(message)
                    return
                except grpc.RpcError as error:
                    delay_s = call.delay_after(error)
                finally:
                    stream.cancel()
                time.sleep(delay_s)
                stream = call.start()

    @contextmanager
    def _abort_if_left(self, call: ResumableCall[Any]) -> Iterator[None]:
        """End the request if the block is left by anything else than its end or its failure."""
        try:
            yield
        except QuireError:
            raise
        except BaseException:
            abort = self._calls.abort_left(call)
            if abort is not None:
                with suppress(grpc.RpcError, ValueError):  # ValueError: the channel is closed
                    abort.start()
            raise
