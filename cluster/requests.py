"""What a caller asks for becomes a checked Request, the same way for the gateway and offline."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..proto.block_tables import IntArray
from ..proto.config import EngineConfig
from ..proto.errors import InvalidRequest, ModelNotFound
from ..proto.sampling import SamplingParams
from ..proto.stream import Submit
from .tokenizer import Tokenizer

MAX_NAME_CHARS = 256

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Request:
    """A request that can be served: the prompt fits and is tokens, max_tokens and seed are set.

    The last four fields are Submit's.
    """

    request_id: str
    prompt_token_ids: IntArray
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    salt: bytes = b""

    @property
    def reports_logprobs(self) -> bool:
        """Its tokens come with their log-probabilities: asked for, or needed to rank the answers."""
        return self.sampling.logprobs is not None or self.sampling.is_ranked

    def submit(self, handle: int) -> Submit:
        """What the scheduler is told; answer i is told of as `handle` + i."""
        sampling = self.sampling
        if self.reports_logprobs and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        standing = self.tenant, self.priority, self.timeout_s, self.salt
        return Submit(handle, self.request_id, self.prompt_token_ids, sampling, *standing)


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
        model: str = "",
        tenant: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> Request:
        """The request, its id made up where it has none.

        Args:
            timeout_s: time left to the caller's deadline.
            cache_salt: prefixes are shared only between equal salts.

        Raises:
            ModelNotFound: another model is asked for.
            InvalidRequest: names the field and what is wrong with it.
        """
        if model not in ("", served := self._config.model.name):
            raise ModelNotFound(f"model {model!r} is not served here; {served!r} is")
        for field, name in (("request_id", request_id), ("tenant", tenant), ("cache_salt", cache_salt)):
            if len(name) > MAX_NAME_CHARS:
                raise InvalidRequest(field, f"is {len(name)} characters, at most {MAX_NAME_CHARS}")
        token_ids = self._tokens(prompt)
        room = self._room(len(token_ids))
        self._check_vocabulary("sampling.stop_token_ids", sampling.stop_token_ids)
        self._check_beams(sampling.beam_width)
        sampling = replace(
            sampling,
            max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
        )
        request_id = request_id or uuid.uuid4().hex
        return Request(request_id, token_ids, sampling, tenant, priority, timeout_s, cache_salt.encode())

    def _tokens(self, prompt: Prompt) -> IntArray:
        if isinstance(prompt, str):
            _check_text(prompt)
            token_ids: Sequence[int] = self._tokenizer.encode(prompt) if prompt else ()
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


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("prompt", f"is not valid Unicode text at character {error.start}") from error
