"""What a caller asks for becomes a checked Request, the same way for the gateway and offline."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.coerce import BadWord
from ...proto.config import EngineConfig
from ...proto.errors import InvalidRequest
from ...proto.sampling import SamplingParams
from ...proto.step import NO_INTS
from ...proto.stream import Submit
from .chat import Chat, check_text
from .tokenizer import Tokenizer

MAX_NAME_CHARS = 256

Prompt = str | Sequence[int] | Chat


@dataclass(frozen=True, slots=True)
class Request:
    """A request that can be served: the prompt fits and is tokens; nothing of the sampling is open any more.

    The fields from `tenant` on are Submit's.
    """

    request_id: str
    prompt_token_ids: IntArray
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    salt: bytes = b""
    generated_token_ids: IntArray = field(default_factory=lambda: NO_INTS)

    @property
    def reports_logprobs(self) -> bool:
        """Its tokens come with their log-probabilities: asked for, or needed to rank the answers."""
        return self.sampling.logprobs is not None or self.sampling.is_ranked

    def submit(self, handle: int) -> Submit:
        """What the scheduler is told; answer i is told of as `handle` + i."""
        sampling = self.sampling
        if self.reports_logprobs and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        return Submit(
            handle,
            self.request_id,
            self.prompt_token_ids,
            sampling,
            tenant=self.tenant,
            priority=self.priority,
            timeout_s=self.timeout_s,
            salt=self.salt,
            generated_token_ids=self.generated_token_ids,
        )

    def resumed(self, index: int, token_ids: Sequence[int]) -> Request:
        """A request for the rest of one answer, of which these tokens are there already."""
        sampling = self.sampling
        rest = replace(
            sampling,
            n=1,
            best_of=None,
            seed=(sampling.seed or 0) + index,
            logprobs=0 if self.reports_logprobs and sampling.logprobs is None else sampling.logprobs,
        )
        return replace(self, sampling=rest, generated_token_ids=np.asarray(token_ids, dtype=np.int32))


class RequestChecker:
    """Checks requests against what one replica serves. Threads may share one."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        # Seeds of requests without one: an offline run with the same configuration repeats itself.
        self._seeds = random.Random(config.model.seed)

    def check(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str = "",
        tenant: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> Request:
        """The request, its id made up where it has none.

        Args:
            timeout_s: time left to the caller's deadline.
            cache_salt: prefixes are shared only between equal salts.
            add_special_tokens: to a prompt of text, by the model's own rule. A chat template adds its own.

        Raises:
            InvalidRequest: names the field and what is wrong with it.
        """
        for what, name in (("request_id", request_id), ("tenant", tenant), ("cache_salt", cache_salt)):
            if len(name) > MAX_NAME_CHARS:
                raise InvalidRequest(what, f"is {len(name)} characters, at most {MAX_NAME_CHARS}")
        token_ids = self._tokens(prompt, add_special_tokens)
        if sampling.truncate_prompt_tokens is not None:
            token_ids = token_ids[-sampling.truncate_prompt_tokens :]
        room = self._room(len(token_ids))
        sampling = self._settled(sampling, room)
        request_id = request_id or uuid.uuid4().hex
        return Request(request_id, token_ids, sampling, tenant, priority, timeout_s, cache_salt.encode())

    def _settled(self, sampling: SamplingParams, room: int) -> SamplingParams:
        """The settings with everything decided that was left open. `room`: tokens that the answer may have."""
        self._check_vocabulary("sampling.stop_token_ids", sampling.stop_token_ids)
        self._check_vocabulary("sampling.logit_bias", [token_id for token_id, _ in sampling.bias_pairs])
        self._check_vocabulary("sampling.allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_beams(sampling.beam_width)
        return replace(
            sampling.with_defaults(self._config.model.sampling_defaults),
            max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            bad_words=self._spelled(sampling.bad_words),
        )

    def _spelled(self, words: Sequence[BadWord]) -> tuple[tuple[int, ...], ...]:
        """The token ids of forbidden words."""
        spelled: list[tuple[int, ...]] = []
        for index, word in enumerate(words):
            where = f"sampling.bad_words[{index}]"
            if isinstance(word, str):
                check_text(where, word)
                spelled += self._tokenizer.spellings(word)
            else:
                self._check_vocabulary(where, word)
                spelled.append(word)
        return tuple(dict.fromkeys(spelled))

    def _tokens(self, prompt: Prompt, add_special_tokens: bool) -> IntArray:
        token_ids: Sequence[int] = ()
        if isinstance(prompt, Chat):
            token_ids = self._tokenizer.encode_chat(prompt)
        elif isinstance(prompt, str):
            check_text("prompt", prompt)
            if prompt:
                token_ids = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            token_ids = prompt
            self._check_vocabulary("prompt", token_ids)
        if len(token_ids) == 0:
            raise InvalidRequest("prompt", "is empty, must have at least one token")
        return np.asarray(token_ids, dtype=np.int32)

    def _check_vocabulary(self, field: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._config.model.vocab_size
        for position, token_id in enumerate(token_ids):
            # bool is an int to Python; numpy's integers are welcome, floats are not.
            if not isinstance(token_id, int | np.integer) or not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{field}[{position}]", f"is {token_id!r}, must be a token id from 0 to {vocab_size - 1}"
                )

    def _check_beams(self, width: int | None) -> None:
        most = self._config.scheduler.max_num_seqs
        if width is not None and width > most:
            raise InvalidRequest(
                "sampling.beam_width", f"is {width}, this replica runs at most {most} at once"
            )

    def _room(self, num_prompt_tokens: int) -> int:
        """Tokens that an answer to this prompt can have; raises InvalidRequest when there is none."""
        config = self._config
        room = config.max_servable_tokens - num_prompt_tokens
        if room >= 1:
            return room
        if num_prompt_tokens >= config.model.max_model_len:
            limit = f"the context of {config.model.max_model_len} tokens"
        else:
            limit = f"the whole KV memory of {config.max_servable_tokens} tokens"
        raise InvalidRequest(
            "prompt", f"has {num_prompt_tokens} tokens, which leaves no room for an answer in {limit}"
        )
