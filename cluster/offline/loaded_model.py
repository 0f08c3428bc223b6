"""LoadedModel: a model with its engine, tokenizer and checks of requests, of LLM and of the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ...proto.config import EngineConfig
from ...proto.errors import InvalidType
from ...proto.lora import LoraReference
from ...proto.pooling import PoolingParams
from ...proto.sampling import SamplingParams
from ..config.engine_options import EngineOptions
from ..config.machine import Machine
from ..config.resolve import resolve
from ..text.media.image_source import ImageSource
from ..text.media.transformers_processor import local_image_processor
from ..text.requests.chat import Chat
from ..text.requests.prompt_images import ImagePrompt
from ..text.requests.request import AnyPrompt, Request, RequestChecker
from ..text.requests.tokenizer import load_tokenizer
from .engine import Engine, OutputCollector
from .prompts import LoRARequest, ReadPrompt


class LoadedModel:
    """A model that is ready for requests. Close its engine.

    Raises:
        ConfigError: the machine or the model does not allow an option.
        ModelLoadError: the model directory cannot be read.
    """

    def __init__(self, options: EngineOptions) -> None:
        config = _resolve(options)
        self.tokenizer = load_tokenizer(config.model)
        self.engine = _make_engine(config)
        self.config = self.engine.config
        self.checker = RequestChecker(
            self.config, self.tokenizer, image_processor=local_image_processor(self.config)
        )

    def collector(
        self,
        prompt: ReadPrompt,
        sampling: SamplingParams,
        *,
        request_id: str = "",
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
        add_special_tokens: bool = True,
        pooling: PoolingParams | None = None,
    ) -> OutputCollector:
        """Return the collector of a valid request.

        Args:
            priority: as in vLLM, lower values are scheduled first.

        Raises:
            InvalidRequest: the prompt cannot be served.
        """
        request = self.checker.check(
            self._fetched(prompt.prompt),
            sampling,
            request_id=request_id,
            priority=-priority,
            tenant=tenant,
            cache_salt=cache_salt if prompt.cache_salt is None else prompt.cache_salt,
            add_special_tokens=add_special_tokens,
            lora=_lora_reference(lora_request),
            pooling=pooling,
        )
        return OutputCollector(
            self._text_of(prompt, request),
            request,
            self.config.model.name,
            self.tokenizer,
            lora_request=lora_request,
            flat_logprobs=sampling.flat_logprobs,
        )

    def _fetched(self, prompt: AnyPrompt) -> AnyPrompt:
        """Return a prompt with the files of images that have to be fetched from allowed hosts."""
        remote = self.checker.remote_images(prompt)
        if not remote or not isinstance(prompt, Chat | ImagePrompt):
            return prompt
        from ..text.media.fetch import ImageFetcher  # httpx, which few calls need

        domains = self.config.images.media_domains

        async def fetch() -> Mapping[str, ImageSource]:
            return await ImageFetcher(domains).fetch_all(remote)

        with ThreadPoolExecutor(1) as thread:  # the caller's may run an event loop
            return prompt.with_images(thread.submit(asyncio.run, fetch()).result())

    def _text_of(self, prompt: ReadPrompt, request: Request) -> str | None:
        """Return the text of a prompt for its output: of a chat, what the template made of it."""
        if not isinstance(prompt.prompt, Chat) or self.config.model.skip_tokenizer_init:
            return prompt.text
        return self.tokenizer.decode(request.prompt_token_ids.tolist(), skip_special_tokens=False)


def _resolve(options: EngineOptions) -> EngineConfig:
    """Resolve the options; with one step in flight by default if the scheduler and a CPU rank share a thread."""
    config = resolve(options, Machine.this())
    parallel = config.parallel
    if options.max_steps_in_flight or parallel.device != "cpu" or parallel.num_ranks > 1:
        return config
    return replace(config, scheduler=replace(config.scheduler, max_steps_in_flight=1))


def _make_engine(config: EngineConfig) -> Engine:
    if config.parallel.num_ranks == 1:
        from .in_process import InProcessEngine  # torch, which a larger LLM leaves to its ranks

        return InProcessEngine(config)
    from .cluster_engine import ClusterEngine  # Ray and ZeroMQ, which one rank does without

    return ClusterEngine(config)


def _lora_reference(adapter: LoRARequest | None) -> LoraReference | None:
    """Raises InvalidType if the adapter is something else."""
    if adapter is None:
        return None
    if not isinstance(adapter, LoRARequest):
        raise InvalidType("lora_request", f"is of type {type(adapter).__name__}, must be LoRARequest")
    return adapter.reference
