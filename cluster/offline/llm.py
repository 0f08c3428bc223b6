"""LLM: offline inference with vLLM's interface.

One rank runs in this process, with the scheduler and the worker of a replica. Several ranks run in a private local
cluster.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np

from ...proto.config import EngineConfig
from ...proto.errors import InvalidRequest
from ...proto.sampling import SamplingParams
from ..config.resolve import Machine, resolve
from ..requests.chat import Chat
from ..requests.chat_messages import Message
from ..requests.outputs import RequestOutput
from ..requests.request import Prompt, RequestChecker
from ..requests.tokenizer import Tokenizer
from .engine import Engine, OutputCollector
from .engine_arguments import read_engine_options, takes_engine_options

_SEQUENCES = (Sequence, np.ndarray)

T = TypeVar("T")


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
        engine_options = read_engine_options(str(model), options, os.environ)
        config = resolve(engine_options, Machine.this())
        self._tokenizer = Tokenizer(config.model.path)
        self._engine = _make_engine(config)
        # Runs at interpreter exit as well: a local cluster must not outlive its owner.
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
        """Return the completions of all prompts, in the order of the prompts.

        Args:
            prompts: one prompt or several, each as text, token ids or a Chat.
            sampling_params: one for all prompts, or one per prompt; None means the defaults.
            priority: one or one per prompt; higher values are scheduled first if the policy is ``priority``.
            tenant: one or one per prompt; tenants share no cached prefixes, and share the engine evenly if the
                policy is ``fair``.
            cache_salt: one or one per prompt; prefix caching shares KV only between equal tenants and salts.
            add_special_tokens: the tokenizer adds its special tokens to text prompts.
            progress: show a progress bar.

        Raises:
            InvalidRequest: a prompt cannot be served. No request was started.
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
        collectors = [
            OutputCollector(prompt, request, self.config.model.name, self._tokenizer)
            for prompt, request in zip(several, requests, strict=True)
        ]
        with _progress_bar(len(collectors), progress) as advance:
            self._engine.run(collectors, advance)
        return [collector.output() for collector in collectors]

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
        """Return the completions of conversations, rendered by the model's chat template.

        Args:
            messages: one conversation, a list of ``{"role": "user", "content": "..."}``, or a list of conversations.
            continue_final_message: continue the last message, which must be the assistant's, instead of a new one.
            template_options: further variables of the template by name.

        The other arguments are those of `generate`.

        Raises:
            InvalidRequest: a conversation cannot be served, or the model has no template. No request was started.
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


def _make_engine(config: EngineConfig) -> Engine:
    if config.parallel.tensor_parallel_size == 1:
        from .in_process import InProcessEngine  # torch, which a larger LLM leaves to its ranks

        return InProcessEngine(config)
    from .cluster_engine import ClusterEngine  # Ray and ZeroMQ, which one rank does without

    return ClusterEngine(config)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. Raises InvalidRequest for anything else."""
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
    """Return one value per prompt. Raises InvalidRequest, which names the argument, if the numbers differ."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(name, f"are {len(given)} for {count} prompts, must be one or {count}")
    return given
