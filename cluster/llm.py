"""LLM: offline inference in the words that users of vLLM know.

With one rank everything runs in this process, by the scheduler and the worker that serve in a cluster; with
more, a private local cluster is started.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, cast

import numpy as np
from rich.progress import Progress

from ..proto.config import EngineConfig
from ..proto.errors import InvalidRequest
from ..proto.sampling import SamplingParams
from .answer import Answer
from .events import Delta, Finished, Output, TokenLogprobs, collect
from .news import News
from .replica_client import ReplicaClient
from .requests import Prompt, Request, RequestChecker
from .resolve import resolve
from .tokenizer import Tokenizer

# Offline, the caller holds all prompts anyway; nothing is gained by refusing some.
_MAX_QUEUE_LEN = 1 << 30
_SEQUENCES = (Sequence, np.ndarray)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability at one position.

    Attributes:
        rank: 1 for the likeliest token; None where it is beyond those that were asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        finish_reason: ``stop`` or ``length``.
        stop_reason: the stop string or stop token that ended it; None for the model's end of sequence.
        logprobs: for each token, token id |-> Logprob, of the token itself and of the likeliest; None unless
            asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers.

    Attributes:
        prompt: None where token ids were given.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """A model, loaded to answer prompts from this program. Close it, or use it as a context manager.

    Args:
        model: a Hugging Face model directory, or ``demo`` for the bundled model.
        max_num_seqs: sequences that run at once.
        seed: where seeds of requests without one are drawn from; the same program gives the same answers.

    The other arguments are those of `resolve`.

    Raises:
        ConfigError: what is asked for cannot be started here.
        ModelLoadError: the model directory cannot be read.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_memory: int | None = None,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        prefix_caching: bool = True,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        seed: int = 0,
    ) -> None:
        config = resolve(
            str(model),
            tensor_parallel_size=tensor_parallel_size,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_memory=kv_cache_memory,
            num_kv_blocks=num_kv_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            prefix_caching=prefix_caching,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queue_len=_MAX_QUEUE_LEN,
            max_steps_in_flight=1 if tensor_parallel_size == 1 else 2,
            seed=seed,
        )
        self._tokenizer = Tokenizer(config.model.path)
        self._engine: _Engine = _OneProcess(config) if tensor_parallel_size == 1 else _Cluster(config)
        # Also when the interpreter exits: a local cluster must not outlive its owner.
        self._close = weakref.finalize(self, self._engine.close)
        self.config = self._engine.config
        self._checker = RequestChecker(self.config, self._tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order.

        Args:
            prompts: one prompt or several, each as text or token ids.
            sampling_params: one for all, or one for each; None: the defaults.
            progress: show a progress bar.

        Raises:
            InvalidRequest: one of the prompts cannot be served; none is started.
        """
        several = _as_list(prompts)
        requests = [
            self._checker.check(prompt, params)
            for prompt, params in zip(several, _spread(sampling_params, len(several)), strict=True)
        ]
        writers = [_Writer(request, self._tokenizer) for request in requests]
        with Progress(disable=not progress) as bar:
            task = bar.add_task("requests", total=len(writers))
            self._engine.run(writers, lambda: bar.advance(task))
        return [
            self._output(prompt, writer.request, writer.output)
            for prompt, writer in zip(several, writers, strict=True)
        ]

    def close(self) -> None:
        """Ends what was started and frees the model. Safe to call twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _output(self, prompt: Prompt, request: Request, output: Output) -> RequestOutput:
        completion = CompletionOutput(
            index=output.index,
            text=output.text,
            token_ids=list(output.token_ids),
            finish_reason=str(output.finish_reason),
            stop_reason=output.finished.stop_reason,
            logprobs=None if request.sampling.logprobs is None else self._logprobs(output),
        )
        text = prompt if isinstance(prompt, str) else None
        return RequestOutput(request.request_id, text, request.prompt_token_ids.tolist(), [completion])

    def _logprobs(self, output: Output) -> list[dict[int, Logprob]]:
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return [self._logprobs_at(token_id, entry) for token_id, entry in pairs]

    def _logprobs_at(self, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        ranked = dict(zip(entry.top_token_ids, enumerate(entry.top_logprobs, start=1), strict=True))
        text = self._tokenizer.token_text
        found = {top_id: Logprob(logprob, rank, text(top_id)) for top_id, (rank, logprob) in ranked.items()}
        rank = found[token_id].rank if token_id in found else None
        return {token_id: Logprob(entry.chosen, rank, text(token_id))} | found


class _Writer:
    """Writes down one request's answer."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self._answer = Answer(request, tokenizer)
        self._deltas: list[Delta] = []
        self._finished: Finished | None = None

    @property
    def output(self) -> Output:
        assert self._finished is not None, "the request still runs"
        return collect(self._deltas, self._finished)

    @property
    def is_complete(self) -> bool:
        """A stop string was found: the sequence is to be stopped."""
        return self._answer.is_complete

    def take(self, news: News) -> bool:
        """True when this was the end. Raises the QuireError that ended the request."""
        delta, self._finished = self._answer.take(news)
        if delta is not None:
            self._deltas.append(delta)
        return self._finished is not None


class _Engine(Protocol):
    config: EngineConfig

    def run(self, writers: list[_Writer], advance: Callable[[], None]) -> None:
        """Runs every writer's request to its end; calls `advance` at each end."""
        ...

    def close(self) -> None: ...


class _OneProcess:
    def __init__(self, config: EngineConfig) -> None:
        from .in_process import InProcessEngine  # torch, which a larger LLM leaves to its ranks

        self._engine = InProcessEngine(config)
        self.config = self._engine.config

    def run(self, writers: list[_Writer], advance: Callable[[], None]) -> None:
        interrupted = threading.Event()
        # On a thread of their own, because a Ctrl-C in the middle of a step would leave half of it done.
        with ThreadPoolExecutor(1, "steps") as pool:
            steps = pool.submit(self._run, writers, advance, interrupted)
            try:
                steps.result()
            finally:
                interrupted.set()

    def _run(self, writers: list[_Writer], advance: Callable[[], None], interrupted: threading.Event) -> None:
        running = dict(enumerate(writers))
        try:
            for handle, writer in running.items():
                self._engine.submit(handle, writer.request)
            while running and not interrupted.is_set():
                for handle, news in self._engine.step():
                    writer = running[handle]
                    if writer.take(news) or (writer.is_complete and writer.take(self._engine.stop(handle))):
                        del running[handle]
                        advance()
        finally:
            for handle in running:
                self._engine.abort(handle)

    def close(self) -> None:
        self._engine.close()


class _Cluster:
    def __init__(self, config: EngineConfig) -> None:
        from .replica import LocalCluster, num_actors, start_replica  # Ray, which one rank does without

        with ExitStack() as opened:
            cluster = opened.enter_context(LocalCluster(num_actors(config.parallel.tensor_parallel_size)))
            self._replica = opened.enter_context(start_replica(config, cluster))
            self._opened = opened.pop_all()
        self.config = self._replica.config

    def run(self, writers: list[_Writer], advance: Callable[[], None]) -> None:
        _run_to_end(self._run(writers, advance))

    async def _run(self, writers: list[_Writer], advance: Callable[[], None]) -> None:
        client = ReplicaClient(
            self._replica.address,
            self._replica.replica_id,
            patience_s=self.config.scheduler.step_timeout_s + 5.0,
        )
        client.start()
        client.watch(self._replica.failure)
        try:
            await asyncio.gather(*(_follow(client, writer, advance) for writer in writers))
        finally:
            await client.close()

    def close(self) -> None:
        self._opened.close()


async def _follow(client: ReplicaClient, writer: _Writer, advance: Callable[[], None]) -> None:
    sequence = client.submit(writer.request)
    try:
        async for news in sequence:
            if writer.take(news):
                advance()
                return
            if writer.is_complete:
                sequence.stop()
    finally:
        sequence.abort()


def _run_to_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Also where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(coroutine)
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, coroutine).result()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or as token ids, is a list of one. Raises InvalidRequest on what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, _SEQUENCES) and len(prompts) > 0 and isinstance(prompts[0], int | np.integer):
        return [cast(Sequence[int], prompts)]
    if not isinstance(prompts, _SEQUENCES) or not all(
        isinstance(prompt, (str, *_SEQUENCES)) for prompt in prompts
    ):
        raise InvalidRequest("prompts", "must be text or token ids, or a list of such")
    return list(cast(Sequence[Prompt], prompts))


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest(
            "sampling_params", f"are {len(params)} for {count} prompts, must be one or as many"
        )
    return params
