"""LLM: offline inference in the words that users of vLLM know.

With one rank everything runs in this process, by the scheduler and the worker that serve in a cluster; with
more, a private local cluster is started.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np
from rich.progress import Progress

from ...proto.config import EngineConfig
from ...proto.errors import InvalidRequest
from ...proto.sampling import SamplingParams
from ..config.resolve import resolve
from ..requests.chat import Chat, Message
from ..requests.outputs import Output, TokenLogprobs, collect_prompt_logprobs
from ..requests.request import Prompt, RequestChecker
from ..requests.tokenizer import Tokenizer
from .engine import Engine, OutputCollector

# Offline, the caller holds all prompts anyway; nothing is gained by refusing some.
_MAX_QUEUE_LEN = 1 << 30
_SEQUENCES = (Sequence, np.ndarray)

T = TypeVar("T")


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
        cumulative_logprob: sum of the tokens' log-probabilities; None without logprobs and best_of.
        score: beam search: the summed log-probability over the length to the power of length_penalty; else None.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers.

    Attributes:
        prompt: None where token ids or a conversation were given.
        outputs: by index; the best first where they were ranked (best_of, beam search).
        prompt_logprobs: for each token of the prompt, token id |-> Logprob, of the token itself and of the
            likeliest; None for the first, and as a whole unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


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
        quantization: str | None = None,
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_memory: int | None = None,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        prefix_caching: bool = True,
        batch_invariant: bool = False,
        fused_all_reduce: bool = False,
        cuda_graphs: bool = True,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        policy: str = "fcfs",
        num_host_kv_blocks: int = 0,
        kv_cache_dtype: str = "auto",
        seed: int = 0,
    ) -> None:
        config = resolve(
            str(model),
            tensor_parallel_size=tensor_parallel_size,
            device=device,
            dtype=dtype,
            quantization=quantization,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_memory=kv_cache_memory,
            num_kv_blocks=num_kv_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            prefix_caching=prefix_caching,
            batch_invariant=batch_invariant,
            fused_all_reduce=fused_all_reduce,
            cuda_graphs=cuda_graphs,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queue_len=_MAX_QUEUE_LEN,
            max_steps_in_flight=1 if tensor_parallel_size == 1 else 2,
            policy=policy,
            num_host_kv_blocks=num_host_kv_blocks,
            kv_cache_dtype=kv_cache_dtype,
            seed=seed,
        )
        self._tokenizer = Tokenizer(config.model.path)
        self._engine = _make_engine(config)
        # Also when the interpreter exits: a local cluster must not outlive its owner.
        self._close = weakref.finalize(self, self._engine.close)
        self.config = self._engine.config
        self._checker = RequestChecker(self.config, self._tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str | Sequence[str] = "",
        add_special_tokens: bool = True,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order.

        Args:
            prompts: one prompt or several, each as text, token ids or a Chat.
            sampling_params: one for all, or one for each; None: the defaults.
            priority: likewise; higher goes first, where the policy is ``priority``.
            tenant: likewise; who shares fairly, where the policy is ``fair``.
            cache_salt: likewise; KV of prompts is shared only between equal salts.
            add_special_tokens: to prompts of text, by the rule of the model's tokenizer.
            progress: show a progress bar.

        Raises:
            InvalidRequest: one of the prompts cannot be served; none is started.
        """
        several = _as_list(prompts)
        sampling_params = SamplingParams() if sampling_params is None else sampling_params
        params = _spread("sampling_params", sampling_params, len(several))
        priorities: Sequence[int] = _spread("priority", priority, len(several))
        tenants: Sequence[str] = _spread("tenant", tenant, len(several))
        salts: Sequence[str] = _spread("cache_salt", cache_salt, len(several))
        requests = [
            self._checker.check(
                prompt,
                sampling,
                priority=number,
                tenant=owner,
                cache_salt=salt,
                add_special_tokens=add_special_tokens,
            )
            for prompt, sampling, number, owner, salt in zip(
                several, params, priorities, tenants, salts, strict=True
            )
        ]
        collectors = [OutputCollector(request, self._tokenizer) for request in requests]
        with Progress(disable=not progress) as bar:
            task = bar.add_task("requests", total=len(collectors))
            self._engine.run(collectors, lambda: bar.advance(task))
        return [self._result(*pair) for pair in zip(several, collectors, strict=True)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        continue_final_message: bool = False,
        template_options: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str | Sequence[str] = "",
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers conversations by the model's own chat template.

        Args:
            messages: of one conversation, ``{"role": "user", "content": "..."}`` each, or several conversations.
            continue_final_message: the answer goes on with the last message, which is the assistant's.
            template_options: what else the template takes, by name.

        The other arguments are those of `generate`.

        Raises:
            InvalidRequest: a conversation cannot be served, or the model has no template; none is started.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        chats = [
            Chat(cast(Sequence[Message], conversation), continue_final_message, template_options or {})
            for conversation in conversations
        ]
        return self.generate(
            chats, sampling_params, priority=priority, tenant=tenant, cache_salt=cache_salt, progress=progress
        )

    def close(self) -> None:
        """Ends what was started and frees the model. Safe to call twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _result(self, prompt: Prompt, collector: OutputCollector) -> RequestOutput:
        request = collector.request
        completions = [
            CompletionOutput(
                index=output.index,
                text=output.text,
                token_ids=list(output.token_ids),
                finish_reason=str(output.finish_reason),
                stop_reason=output.finished.stop_reason,
                logprobs=None if request.sampling.logprobs is None else self._logprobs(output),
                cumulative_logprob=output.cumulative_logprob,
                score=output.score,
            )
            for output in collector.outputs
        ]
        text, token_ids = prompt if isinstance(prompt, str) else None, request.prompt_token_ids.tolist()
        of_prompt = None
        if request.sampling.prompt_logprobs is not None:
            of_prompt = [
                None if entry is None else self._logprobs_at(token_id, entry)
                for token_id, entry in zip(token_ids, collect_prompt_logprobs(collector.pieces), strict=True)
            ]
        return RequestOutput(request.request_id, text, token_ids, completions, of_prompt)

    def _logprobs(self, output: Output) -> list[dict[int, Logprob]]:
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return [self._logprobs_at(token_id, entry) for token_id, entry in pairs]

    def _logprobs_at(self, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        ranked = dict(zip(entry.top_token_ids, enumerate(entry.top_logprobs, start=1), strict=True))
        text = self._tokenizer.token_text
        found = {top_id: Logprob(logprob, rank, text(top_id)) for top_id, (rank, logprob) in ranked.items()}
        rank = found[token_id].rank if token_id in found else None
        return {token_id: Logprob(entry.chosen, rank, text(token_id))} | found


def _make_engine(config: EngineConfig) -> Engine:
    if config.parallel.tensor_parallel_size == 1:
        from .in_process import InProcessEngine  # torch, which a larger LLM leaves to its ranks

        return InProcessEngine(config)
    from .cluster_engine import ClusterEngine  # Ray and ZeroMQ, which one rank does without

    return ClusterEngine(config)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or as token ids, is a list of one. Raises InvalidRequest on what is neither."""
    if isinstance(prompts, str | Chat):
        return [prompts]
    if isinstance(prompts, _SEQUENCES) and len(prompts) > 0 and isinstance(prompts[0], int | np.integer):
        return [cast(Sequence[int], prompts)]
    if not isinstance(prompts, _SEQUENCES) or not all(
        isinstance(prompt, (str, Chat, *_SEQUENCES)) for prompt in prompts
    ):
        raise InvalidRequest("prompts", "must be text, token ids or a Chat, or a list of such")
    return list(cast(Sequence[Prompt], prompts))


def _spread(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """One for all, or one for each. Raises InvalidRequest, which names them, when they are neither."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(name, f"are {len(given)} for {count} prompts, must be one or as many")
    return given
