"""LLM: offline inference with vLLM's interface.

One rank runs in this process, with the scheduler and the worker of a replica. Several ranks run in a private local
cluster.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack, cast

from ...proto.errors import InvalidRequest
from ...proto.options.option import write_table
from ...proto.pooling import PoolingParams
from ...proto.sampling import SamplingParams
from ..config.engine_options import EngineOptions
from ..text.requests.chat import Chat, Tool
from ..text.requests.chat_messages import Message
from ..text.requests.engine_commands import (
    RESET_PREFIX_CACHE,
    collective_results,
    read_collective_call,
    sleep_command,
    update_command,
    wake_up_command,
)
from ..text.requests.outputs import RequestOutput
from ..text.requests.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from .beams import BeamSearchOutput, BeamSearchParams, beam_search_output
from .engine_arguments import read_engine_options, takes_engine_options
from .loaded_model import LoadedModel
from .metrics import Metric, metrics_of
from .pooling import PooledPrompt, PooledRequests
from .prompts import LoRARequest, PromptInput, read_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class GenerateOptions(TypedDict, total=False):
    """Options that all calls of LLM share; see `LLM.generate`."""

    use_tqdm: bool
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    priority: int | Sequence[int] | None
    tenant: str | Sequence[str]
    cache_salt: str | Sequence[str]


class LLM:
    """A loaded model for offline inference. Close it, or use it as a context manager.

    Args:
        model: a Hugging Face model directory, or ``demo`` for the bundled model.
        options: the fields of `EngineOptions`, which are the options of `quire serve` with underscores. Options that
            are not given come from the environment (``QUIRE_MAX_NUM_SEQS``), else from the defaults.

    Raises:
        ConfigError: there is no such option, or the machine or the model does not allow its value.
        ModelLoadError: the model directory cannot be read.
    """

    @takes_engine_options
    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        loaded = self._loaded = LoadedModel(read_engine_options(str(model), options, os.environ))
        # Runs at interpreter exit as well: a local cluster must not outlive its owner.
        self._close = weakref.finalize(self, loaded.engine.close)
        self.config, self._engine, self._tokenizer = loaded.config, loaded.engine, loaded.tokenizer
        self._weights_folder: TemporaryDirectory[str] | None = None
        self._pooled = PooledRequests(self._engine, loaded.checker, self._tokenizer)

    @classmethod
    def from_engine_args(cls, engine_args: EngineOptions) -> Self:
        """Return an LLM with these options, which may be an `EngineArgs`."""
        return cls(engine_args.model, **write_table(engine_args))

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = "",
        cache_salt: str | Sequence[str] = "",
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Return the completions of all prompts, in the order of the prompts.

        Args:
            prompts: one prompt or several, each as text, token ids, ``{"prompt": text}``,
                ``{"prompt_token_ids": ids}`` or a Chat.
            sampling_params: one for all prompts, or one per prompt; None means the defaults.
            use_tqdm: show a progress bar.
            lora_request: one for all prompts, or one per prompt; None for the model alone. Needs `enable_lora`.
            priority: one or one per prompt; lower values are scheduled first if the policy is ``priority``, as in
                vLLM. In quire.v1 higher values are.
            tenant: one or one per prompt; tenants share no cached prefixes, and share the engine evenly if the
                policy is ``fair``.
            cache_salt: one or one per prompt; prefix caching shares KV only between equal tenants and salts. A
                prompt's own ``cache_salt`` wins.
            add_special_tokens: the tokenizer adds its special tokens to text prompts.

        Raises:
            InvalidRequest: a prompt cannot be served. No request was started.
            LoraLoadError: an adapter cannot be read, or does not fit the model.
        """
        several = read_prompts(prompts)
        sampling_params = SamplingParams() if sampling_params is None else sampling_params
        params = _spread("sampling_params", sampling_params, len(several))
        priorities: Sequence[int] = _spread("priority", 0 if priority is None else priority, len(several))
        tenants: Sequence[str] = _spread("tenant", tenant, len(several))
        salts: Sequence[str] = _spread("cache_salt", cache_salt, len(several))
        adapters: Sequence[LoRARequest | None] = _spread("lora_request", lora_request, len(several))
        collectors = [
            self._loaded.collector(
                each,
                own,
                priority=number,
                tenant=owner,
                cache_salt=salt,
                lora_request=adapter,
                add_special_tokens=add_special_tokens,
            )
            for each, own, number, owner, salt, adapter in zip(
                several, params, priorities, tenants, salts, adapters, strict=True
            )
        ]
        with _progress_bar(len(collectors), use_tqdm) as advance:
            self._engine.run(collectors, advance)
        return [collector.output() for collector in collectors]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[RequestOutput]:
        """Return the completions of conversations, rendered by the model's chat template.

        Args:
            messages: one conversation, a list of ``{"role": "user", "content": "..."}``, or a list of conversations.
                Content is text, or a list of parts of text and images: ``{"type": "image_url", "image_url": {"url":
                ...}}`` or ``{"type": "image_pil", "image_pil": PIL.Image}``.
            chat_template: source of a template to use instead of the model's.
            add_generation_prompt: end the prompt with the beginning of the assistant's message.
            continue_final_message: continue the last message, which must be the assistant's, instead of a new one.
            tools: functions that the model may call, in the form of OpenAI's API.
            chat_template_kwargs: further variables of the template by name, for example ``enable_thinking``.
            mm_processor_kwargs: settings of the model's image processor that replace its own.
            options: use_tqdm, lora_request, priority, tenant and cache_salt of `generate`.

        Raises:
            InvalidRequest: a conversation cannot be served, or the model has no template. No request was started.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        chats = [
            Chat(
                cast(Sequence[Message], conversation),
                continue_final_message,
                chat_template_kwargs or {},
                tools=tools or (),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                image_settings=mm_processor_kwargs or {},
            )
            for conversation in conversations
        ]
        return self.generate(chats, sampling_params, **options)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        **options: Unpack[GenerateOptions],
    ) -> list[BeamSearchOutput]:
        """Return the beams of all prompts, in the order of the prompts.

        Args:
            prompts: the same as in `generate`.
            options: use_tqdm, lora_request, priority, tenant and cache_salt of `generate`.

        Raises:
            InvalidRequest: a prompt cannot be served. No request was started.
        """
        outputs = self.generate(prompts, params.sampling_params(), **options)
        return [beam_search_output(output, params, self._tokenizer) for output in outputs]

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of all prompts, in the order of the prompts.

        Args:
            prompts: the same as in `generate`.
            pooling_params: one for all prompts, or one per prompt; None means the defaults.
            options: use_tqdm, lora_request, priority, tenant and cache_salt of `generate`.

        Raises:
            InvalidRequest: a prompt cannot be served, or the model does not embed. No request was started.
        """
        pooled = self._pooled_prompts(prompts, pooling_params, options)
        with _progress_bar(len(pooled), options.get("use_tqdm", False)) as advance:
            return self._pooled.embed(pooled, advance)

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[ClassificationRequestOutput]:
        """Return the scores of the model's classes for all prompts; the arguments are those of `embed`.

        A reward model has one class. Its score is not limited to 0 to 1 with ``use_activation=False``.

        Raises:
            InvalidRequest: a prompt cannot be served, or the model does not classify. No request was started.
        """
        pooled = self._pooled_prompts(prompts, pooling_params, options)
        with _progress_bar(len(pooled), options.get("use_tqdm", False)) as advance:
            return self._pooled.classify(pooled, advance)

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the vectors of all prompts as tensors of torch: embeddings, or the scores of classes.

        Args:
            pooling_task: ``embed`` or ``classify``; None for what the model does. vLLM's tasks with a vector per
                token are refused.
            options: as in `embed`.

        Raises:
            InvalidRequest: a prompt cannot be served, or the model does something else. No request was started.
        """
        pooled = self._pooled_prompts(prompts, pooling_params, options)
        with _progress_bar(len(pooled), options.get("use_tqdm", False)) as advance:
            return self._pooled.encode(pooled, pooling_task, advance)

    def reward(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the scores of a reward model for all prompts, each of the whole prompt and not limited to 0 to 1.

        Args:
            pooling_params: None for scores without an activation.
            options: as in `embed`.

        Raises:
            InvalidRequest: a prompt cannot be served, or the model does not classify. No request was started.
        """
        raw = PoolingParams(use_activation=False)
        params = raw if pooling_params is None else pooling_params
        return self.encode(prompts, params, pooling_task="classify", **options)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoringRequestOutput]:
        """Return a score of each text of `data_2`, by how well it goes with its text of `data_1`.

        A reranker reads both texts together; with an embedding model the score is the cosine of their embeddings.

        Args:
            data_1: one text for all, or one for each of `data_2`.

        Raises:
            InvalidRequest: a text cannot be served, or the model does not score. No request was started.
        """
        queries = [data_1] if isinstance(data_1, str) else list(data_1)
        documents = [data_2] if isinstance(data_2, str) else list(data_2)
        with _progress_bar(len(documents), use_tqdm) as advance:
            return self._pooled.score(queries, documents, pooling_params or PoolingParams(), advance)

    def _pooled_prompts(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        options: GenerateOptions,
    ) -> list[PooledPrompt]:
        several = read_prompts(prompts)
        count = len(several)
        params: Sequence[PoolingParams] = _spread("pooling_params", pooling_params or PoolingParams(), count)
        priority, salt = options.get("priority"), options.get("cache_salt", "")
        priorities: Sequence[int] = _spread("priority", 0 if priority is None else priority, count)
        tenants: Sequence[str] = _spread("tenant", options.get("tenant", ""), count)
        salts: Sequence[str] = _spread("cache_salt", salt, count)
        return [
            PooledPrompt(
                each.prompt, own, -number, owner, salt if each.cache_salt is None else each.cache_salt
            )
            for each, own, number, owner, salt in zip(
                several, params, priorities, tenants, salts, strict=True
            )
        ]

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and KV cache; requests are refused until `wake_up`.

        Args:
            level: 1, `wake_up` reads the weights again from their files. 2, the weights are discarded:
                `update_weights` must name others first.

        Raises:
            InvalidRequest: the level is wrong.
        """
        self._engine.control(sleep_command(level))

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """End `sleep`.

        Args:
            tags: what wakes, of ``weights`` and ``kv_cache``; all if None. Requests are refused until all is awake.
                Weights that were discarded are loaded by `update_weights`.

        Raises:
            InvalidRequest: a tag is unknown, the weights were discarded, or there is not enough memory; the engine
                sleeps on.
        """
        self._engine.control(wake_up_command(tags))

    def update_weights(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tensors: Mapping[str, Any] | None = None,
        version: str,
    ) -> None:
        """Replace the weights, as after a training step. No cached prefix of the earlier ones is used any more.

        Args:
            path: a directory with safetensors files of the same tensors as the model's. Heads that draft, and a tied
                output layer, may be left out.
            tensors: these tensors themselves, of torch, by their names in the checkpoint.
            version: a new name of the weights, which later outputs report as `weights_version`.

        Raises:
            InvalidRequest: tensors are missing or have other shapes or types; the weights have not changed.
        """
        if (path is None) == (tensors is None):
            raise InvalidRequest("path", "must be given, or tensors, and not both")
        if not version:
            raise InvalidRequest("version", "is empty, must be a new name")
        folder = None if tensors is None else write_tensors(tensors)
        source = str(Path(path).resolve()) if path is not None else str(folder and folder.name)
        self._engine.control(update_command(source, version))
        self._weights_folder = folder  # the ranks read it again after a failure or `sleep`

    def reset_prefix_cache(self) -> bool:
        """Forget the cached prefixes. Returns True, as vLLM does if it succeeds."""
        self._engine.flush_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """Return the engine's numbers, under vLLM's names where they mean the same."""
        return metrics_of(self._engine.status())

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Have all ranks carry out a method; return the result of each.

        Args:
            method: ``sleep`` (level), ``wake_up`` (tags), ``update_weights`` (path, version) or
                ``reset_prefix_cache``, whose results are None; or ``rank_status``, the process of each rank. A
                function, which vLLM runs, is refused: no code is sent to ranks.
            timeout: without effect; each method has a deadline.

        Raises:
            InvalidRequest: there is no such method, or it has other arguments, or cannot be carried out.
        """
        command = read_collective_call(method, args, kwargs or {})
        if command is not None:
            self._engine.control(command)
        elif method == RESET_PREFIX_CACHE:
            self._engine.flush_cache()
        return collective_results(method, self._engine.status().ranks)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, an object of transformers."""
        return self._tokenizer.transformers_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return SamplingParams with the values that the model recommends, and quire's defaults for the others."""
        return SamplingParams().with_defaults(self.config.model.sampling_defaults)

    def close(self) -> None:
        """Ends what was started and frees the model. Safe to call twice."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _progress_bar(count: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar while the body runs; yield the function that advances it by one request."""
    if not is_shown:
        yield lambda: None
        return
    from rich.progress import Progress  # 0.1 s, which few callers need

    with Progress() as bar:
        task = bar.add_task("requests", total=count)
        yield lambda: bar.advance(task)


def _spread(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """Return one value per prompt. Raises InvalidRequest, which names the argument, if the numbers differ."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(name, f"are {len(given)} for {count} prompts, must be one or {count}")
    return given


def write_tensors(tensors: Mapping[str, Any]) -> tempfile.TemporaryDirectory[str]:
    """Return a directory with tensors of torch in a safetensors file. Keep it as long as ranks may read it.

    Raises:
        InvalidRequest: there are none.
    """
    from safetensors.torch import save_file  # torch, which an LLM on several ranks does without

    if not tensors:
        raise InvalidRequest("tensors", "are empty, must be all tensors of the model")
    folder = tempfile.TemporaryDirectory(prefix="quire-weights-")
    stored, storages = {}, set[int]()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in storages:
            own = own.clone()  # safetensors refuses tensors that share memory, as tied weights do
        storages.add(own.untyped_storage().data_ptr())
        stored[name] = own
    save_file(stored, Path(folder.name) / "model.safetensors")
    return folder
