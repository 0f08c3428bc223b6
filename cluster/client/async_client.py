"""AsyncClient: quire.v1 for asyncio."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

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


class AsyncClient:
    """Client for asyncio with the methods and arguments of Client. Create it in the event loop that uses it."""

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
            grpc.aio.insecure_channel(each, CHANNEL_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(each, credentials, CHANNEL_OPTIONS)
            for each in servers.targets
        ]
        self._calls = Calls(servers, self._channels, token, timeout_s)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """See `Client.generate`."""
        call = self._calls.resumable(self._calls.generate(prompt, sampling_params, options))
        async with self._abort_if_left(call):
            while True:
                try:
                    return call.read(await call.start())
                except grpc.RpcError as error:
                    delay_s = call.delay_after(error)
                await asyncio.sleep(delay_s)

    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[StreamEvent, None]:
        """See `Client.generate_stream`; ``aclose()`` aborts the request."""
        call = self._calls.resumable(self._calls.generate_stream(prompt, sampling_params, options))
        return self._read_events(call, call.start())

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput:
        """See `Client.chat`."""
        chat, request_options = split_chat(messages, options)
        return await self.generate(chat, sampling_params, **request_options)

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[StreamEvent, None]:
        """See `Client.chat_stream`."""
        chat, request_options = split_chat(messages, options)
        return self.generate_stream(chat, sampling_params, **request_options)

    async def abort(self, request_id: str, *, tenant: str = "") -> bool:
        """See `Client.abort`."""
        return await self._wait(self._calls.abort(request_id, tenant))

    async def models(self) -> list[ModelInfo]:
        """See `Client.models`."""
        return await self._wait(self._calls.models())

    async def status(self) -> list[ReplicaInfo]:
        """See `Client.status`."""
        return await self._wait(self._calls.status())

    async def fleet(self, *, cached: bool = False, timeout_s: float | None = None) -> FleetInfo:
        """See `Client.fleet`."""
        return await self._wait(self._calls.fleet(cached=cached, timeout_s=timeout_s))

    async def block_map(self, replica_id: str, *, timeout_s: float | None = None) -> BlockMapInfo:
        """See `Client.block_map`."""
        return await self._wait(self._calls.block_map(replica_id, timeout_s))

    async def deploy(self, deployment: Deployment) -> str:
        """See `Client.deploy`."""
        return await self._wait(self._calls.deploy(deployment))

    async def delete(self, model: str) -> None:
        """See `Client.delete`."""
        await self._wait(self._calls.delete(model))

    async def drain(self, target: str) -> tuple[str, ...]:
        """See `Client.drain`."""
        return await self._wait(self._calls.drain(target))

    async def undrain(self, target: str) -> tuple[str, ...]:
        """See `Client.undrain`."""
        return await self._wait(self._calls.undrain(target))

    async def set_scale(
        self, model: str, min_replicas: int | None = None, max_replicas: int | None = None
    ) -> tuple[int, int]:
        """See `Client.set_scale`."""
        return await self._wait(self._calls.set_scale(model, min_replicas, max_replicas))

    async def flush_cache(self, model: str = "") -> tuple[str, ...]:
        """See `Client.flush_cache`."""
        return await self._wait(self._calls.flush_cache(model))

    async def load_lora(self, name: str, path: str, *, model: str = "", replace: bool = False) -> None:
        """Have all replicas of a model read a LoRA adapter, which requests name as their model from then on.

        Args:
            path: its directory, on every node.
            model: the model that it changes; not needed if the server serves one.
            replace: replace an adapter of the same name.

        Raises:
            LoraLoadError: a replica cannot read it. It is taken back on all.
        """
        await self._wait(self._calls.load_lora(name, path, model, replace=replace))

    async def unload_lora(self, name: str) -> None:
        """Refuse new requests for an adapter. Requests that run end in order."""
        await self._wait(self._calls.unload_lora(name))

    async def loras(self) -> list[LoraInfo]:
        """Return the LoRA adapters that the server knows."""
        return await self._wait(self._calls.loras())

    async def sleep(
        self, level: int = 1, *, mode: str = "keep", model: str = "", timeout_s: float | None = None
    ) -> None:
        """See `Client.sleep`."""
        await self._wait(self._calls.sleep(level, mode, model, timeout_s))

    async def wake_up(
        self, tags: Iterable[str] = (), *, model: str = "", timeout_s: float | None = None
    ) -> None:
        """See `Client.wake_up`."""
        await self._wait(self._calls.wake_up(tags, model, timeout_s))

    async def pause(self, *, mode: str = "keep", model: str = "", timeout_s: float | None = None) -> None:
        """See `Client.pause`."""
        await self._wait(self._calls.pause(mode, model, timeout_s))

    async def resume(self, *, model: str = "", timeout_s: float | None = None) -> None:
        """See `Client.resume`."""
        await self._wait(self._calls.resume(model, timeout_s))

    async def update_weights(
        self,
        path: str,
        *,
        version: str,
        mode: str = "keep",
        model: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """See `Client.update_weights`."""
        await self._wait(self._calls.update_weights(path, version, mode, model, timeout_s))

    async def inject_fault(
        self, fault: Fault, *, rank: int | None = None, replica_id: str = ""
    ) -> tuple[str, int]:
        """See `Client.inject_fault`."""
        return await self._wait(self._calls.inject_fault(fault, rank, replica_id))

    async def load(self) -> list[ModelLoad]:
        """See `Client.load`."""
        return await self._wait(self._calls.load())

    def watch_events(self) -> AsyncGenerator[FleetEvent, None]:
        """See `Client.watch_events`."""
        call = self._calls.watch_events()
        return self._read_fleet_events(call, call.start())

    async def server_info(self) -> ServerInfo:
        """See `Client.server_info`."""
        return await self._wait(self._calls.server_info())

    async def tokenize(
        self, prompt: str | Chat, *, model: str = "", add_special_tokens: bool = True
    ) -> list[int]:
        """See `Client.tokenize`."""
        return await self._wait(self._calls.tokenize(prompt, model, add_special_tokens))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False
    ) -> str:
        """See `Client.detokenize`."""
        return await self._wait(self._calls.detokenize(token_ids, model, skip_special_tokens))

    async def is_ready(self) -> bool:
        """See `Client.is_ready`."""
        call = self._calls.is_ready()
        try:
            return call.read(await call.start())
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        """Close the connection. Running calls are canceled."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _wait(self, call: Call[T]) -> T:
        for num_tried in itertools.count(1):
            try:
                return call.read(await call.start())
            except grpc.RpcError as error:
                failure = self._calls.next_after(error, num_tried)
                if failure is not None:
                    raise failure from error
        raise AssertionError("the loop ends with a response or an error")

    async def _read_fleet_events(
        self, call: Call[FleetEvent], stream: Any
    ) -> AsyncGenerator[FleetEvent, None]:
        try:
            with self._calls.errors():
                async for message in stream:
                    yield call.read(message)
        finally:
            stream.cancel()

    async def _read_events(
        self, call: ResumableCall[StreamEvent], stream: Any
    ) -> AsyncGenerator[StreamEvent, None]:
        async with self._abort_if_left(call):
            while True:
                try:
                    async for message in stream:
                        yield call.read(message)
                    return
                except grpc.RpcError as error:
                    delay_s = call.delay_after(error)
                finally:
                    stream.cancel()
                await asyncio.sleep(delay_s)
                stream = call.start()

    @asynccontextmanager
    async def _abort_if_left(self, call: ResumableCall[Any]) -> AsyncIterator[None]:
        """End the request if the block is left by anything else than its end or its failure."""
        try:
            yield
        except QuireError:
            raise
        except BaseException:
            abort = self._calls.abort_left(call)
            if abort is not None:
                with suppress(grpc.RpcError, grpc.aio.UsageError):  # UsageError: the channel is closed
                    await abort.start()
            raise
