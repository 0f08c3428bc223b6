"""AsyncLLMEngine and LLMEngine: requests one by one in this process, with vLLM's interface.

Both run the engine of LLM: one rank in this process, several in a private local cluster.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ...proto.engine_command import COMMAND_TIMEOUT_S, EngineCommand
from ...proto.errors import InvalidRequest, ReplicaUnavailable
from ...proto.pooling import PoolingParams
from ...proto.replica_status import ReplicaStatus
from ...proto.sampling import RequestOutputKind, SamplingParams
from ...proto.stream import FlushCache
from ..config.engine_options import EngineOptions
from ..fleet.replica.client import ReplicaClient, SubmittedRequest
from ..text.requests.engine_commands import (
    RESET_PREFIX_CACHE,
    collective_results,
    read_collective_call,
    sleep_command,
    wake_up_command,
)
from ..text.requests.outputs import RequestOutput, StreamEvent
from ..text.requests.pooling import PoolingOutput, PoolingRequestOutput, collect_pooled
from .engine import OutputCollector
from .loaded_model import LoadedModel
from .partial_outputs import PartialOutputs
from .prompts import LoRARequest, PromptInput, read_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STATUS_TIMEOUT_S = 60.0

T = TypeVar("T")


class _Running:
    """A request that runs: an iterator of its events, in the groups in which they come."""

    def __init__(self, collector: OutputCollector, submitted: SubmittedRequest) -> None:
        self.collector, self.submitted = collector, submitted

    async def events(self) -> AsyncGenerator[list[StreamEvent], None]:
        """Yield groups of events. Raises the QuireError that ends the request."""
        processor = self.collector.processor
        async for index, update in self.submitted:
            before = len(self.collector.events)
            self.collector.on_update(index, update)
            if processor.has_stop_string(index):
                self.submitted.stop(index)
            if len(self.collector.events) > before:
                yield self.collector.events[before:]


class AsyncLLMEngine:
    """An engine whose requests come and go, for one event loop. Call `shutdown`.

    Args:
        engine_args: the options, which may be an `AsyncEngineArgs`.

    Raises:
        ConfigError: the machine or the model does not allow an option.
        ModelLoadError: the model directory cannot be read.
    """

    def __init__(self, engine_args: EngineOptions) -> None:
        self._loaded = LoadedModel(engine_args)
        self._close = weakref.finalize(self, self._loaded.engine.close)
        self.config = self._loaded.config
        self._opened: AsyncExitStack | None = None
        self._opening = asyncio.Lock()
        self._client: ReplicaClient | None = None
        self._running: dict[str, _Running] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineOptions) -> Self:
        """Return an engine with these options."""
        return cls(engine_args)

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output of a prompt while it is generated, in the parts of `sampling_params.output_kind`.

        Tokens that come while the caller does something else are in one output. A caller that stops reading ends the
        request.

        Args:
            request_id: its name for `abort`; no other request that runs may have it.
            priority: lower values are scheduled first if the policy is ``priority``.

        Raises:
            InvalidRequest: the prompt cannot be served.
            QuireError: the request failed.
        """
        running = await self.submit(
            prompt, sampling_params, request_id, lora_request=lora_request, priority=priority
        )
        async with aclosing(self.outputs(running, sampling_params.output_kind)) as outputs:
            async for output in outputs:
                yield output

    async def encode(
        self, prompt: PromptInput, pooling_params: PoolingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the vector of a prompt; see `LLM.encode`."""
        from ...worker import as_tensor  # torch

        running = await self.submit(
            prompt, SamplingParams(), request_id, priority=priority, pooling=pooling_params
        )
        try:
            async for _ in running.events():
                pass
        finally:
            self._end(running)
        result, request = collect_pooled(running.collector.events), running.collector.request
        output = PoolingOutput(as_tensor(result.values))
        yield PoolingRequestOutput(request_id, request.prompt_token_ids.tolist(), output, usage=result.usage)

    async def submit(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        pooling: PoolingParams | None = None,
    ) -> _Running:
        """Start a request, whose outputs `outputs` yields."""
        client = await self._connected()
        prompts = read_prompts(prompt)
        if len(prompts) != 1:
            raise InvalidRequest("prompt", f"is a list of {len(prompts)}, must be one prompt")
        collector = await asyncio.to_thread(
            self._loaded.collector,
            prompts[0],
            sampling_params,
            request_id=request_id,
            priority=priority,
            lora_request=lora_request,
            pooling=pooling,
        )
        if request_id in self._running:
            raise duplicate(request_id)
        running = _Running(collector, client.submit(collector.request))
        self._running[request_id] = running
        return running

    async def outputs(
        self, running: _Running, kind: RequestOutputKind
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request that was submitted."""
        parts = PartialOutputs(running.collector, kind)
        try:
            async for events in running.events():
                if kind is not RequestOutputKind.FINAL_ONLY:
                    yield parts.add(events)
            if kind is RequestOutputKind.FINAL_ONLY:
                yield running.collector.output()
        finally:
            self._end(running)

    def _end(self, running: _Running) -> None:
        running.submitted.abort()
        self._running.pop(running.collector.request.request_id, None)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; those that read their outputs get a ReplicaUnavailable. Unknown names are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (running := self._running.get(name)) is not None:
                running.submitted.end(ReplicaUnavailable(f"request {name} was aborted"))

    async def reset_prefix_cache(self) -> bool:
        """Forget the cached prefixes. Returns True."""
        client = await self._connected()
        client.send(FlushCache())
        await client.status(_STATUS_TIMEOUT_S)  # which is answered after it
        return True

    async def sleep(self, level: int = 1) -> None:
        """See `LLM.sleep`."""
        await self._control(sleep_command(level))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """See `LLM.wake_up`."""
        await self._control(wake_up_command(tags))

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return (await self._status()).sleep_level > 0

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See `LLM.collective_rpc`."""
        command = read_collective_call(method, args, kwargs or {})
        if command is not None:
            await self._control(command)
        elif method == RESET_PREFIX_CACHE:
            await self.reset_prefix_cache()
        return collective_results(method, (await self._status()).ranks)

    async def check_health(self) -> None:
        """Raise ReplicaUnavailable if the engine does not answer, or has failed."""
        status = await self._status()
        if status.problem:
            raise ReplicaUnavailable(status.problem)

    async def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, an object of transformers."""
        return self._loaded.tokenizer.transformers_tokenizer

    @property
    def is_running(self) -> bool:
        """Return True if requests can be served."""
        return self._close.alive and not self.errored

    @property
    def errored(self) -> bool:
        """Return True if the engine has failed."""
        return self._client is not None and self._client.latest_status is not None and self._client.has_failed

    async def aclose(self) -> None:
        """End all requests and free the model. Safe to call twice."""
        opened, self._opened, self._client = self._opened, None, None
        if opened is not None:
            await opened.aclose()
        await asyncio.to_thread(self._close)

    async def _connected(self) -> ReplicaClient:
        """Return the client, which the first call opens."""
        async with self._opening:
            if not self._close.alive:
                raise ReplicaUnavailable("the engine was shut down")
            if self._client is None:
                self._opened = AsyncExitStack()
                self._client = await self._opened.enter_async_context(self._loaded.engine.connect())
                await self._client.status(_STATUS_TIMEOUT_S)
            return self._client

    async def _status(self) -> ReplicaStatus:
        return await (await self._connected()).status(_STATUS_TIMEOUT_S)

    async def _control(self, command: EngineCommand) -> None:
        await (await self._connected()).control(command, COMMAND_TIMEOUT_S)


class LLMEngine:
    """An engine that the caller drives step by step. Close it, or use it as a context manager.

    Args:
        engine_args: as for AsyncLLMEngine.
    """

    def __init__(self, engine_args: EngineOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._engine = AsyncLLMEngine(engine_args)
        self._thread.start()
        self.config = self._engine.config
        self._outputs: queue.SimpleQueue[tuple[str, RequestOutput | Exception]] = queue.SimpleQueue()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineOptions) -> Self:
        """Return an engine with these options."""
        return cls(engine_args)

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Start a request, whose outputs `step` returns.

        Args:
            request_id: its name; no other request may have it that runs or whose last output `step` has not returned.

        Raises:
            InvalidRequest: the prompt cannot be served.
        """
        if request_id in self._reading:
            raise duplicate(request_id)
        submitted = self._engine.submit(
            prompt, params, request_id, lora_request=lora_request, priority=priority
        )
        self._reading[request_id] = self._run(self._read(request_id, submitted, params.output_kind))

    def step(self) -> list[RequestOutput]:
        """Wait for the next outputs, and return all that have come; empty if no request runs.

        Raises:
            QuireError: a request failed.
        """
        outputs: list[RequestOutput] = []
        while not self._outputs.empty() or (not outputs and self._reading):
            request_id, output = (
                self._outputs.get()
            )  # one comes: a client fails the requests of a silent engine
            if request_id not in self._reading:  # was aborted
                continue
            if isinstance(output, Exception):
                del self._reading[request_id]
                raise output
            if output.finished:
                del self._reading[request_id]
            outputs.append(output)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has something to wait for."""
        return bool(self._reading)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._reading)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without a further output. Unknown names are ignored."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        tasks = [self._reading.pop(name) for name in names if name in self._reading]
        self._run(_cancel(tasks))

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, an object of transformers."""
        return self._run(self._engine.get_tokenizer())

    def reset_prefix_cache(self) -> bool:
        """Forget the cached prefixes. Returns True."""
        return self._run(self._engine.reset_prefix_cache())

    def close(self) -> None:
        """End all requests and free the model. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._run(self._engine.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _read(
        self, request_id: str, submitted: Coroutine[Any, Any, _Running], kind: RequestOutputKind
    ) -> asyncio.Task[None]:
        """Return the task that reads a request's outputs, once it was submitted."""
        running = await submitted

        async def read() -> None:
            try:
                async for output in self._engine.outputs(running, kind):
                    self._outputs.put((request_id, output))
            except Exception as error:
                self._outputs.put((request_id, error))

        return asyncio.create_task(read())


def duplicate(request_id: str) -> InvalidRequest:
    """Return the error of a request whose name another one has."""
    return InvalidRequest("request_id", f"is {request_id!r}, which another request has that runs")


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
