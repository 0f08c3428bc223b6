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

MAX_REQUEST_ID_CHARS = 256

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Request:
    """A request that can be served: the prompt fits and is tokens, max_tokens and seed are set."""

    request_id: str
    prompt_token_ids: IntArray
    sampling: SamplingParams

    def submit(self, handle: int) -> Submit:
        return Submit(handle, self.request_id, self.prompt_token_ids, self.sampling)


class RequestChecker:
    """Checks requests against what one replica serves. Threads may share one."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        # Seeds of requests without one: an offline run with the same configuration repeats itself.
        self._seeds = random.Random(config.model.seed)

    def check(
        self, prompt: Prompt, sampling: SamplingParams, *, request_id: str = "", model: str = ""
    ) -> Request:
        """The request, its id made up where it has none.

        Raises:
            ModelNotFound: another model is asked for.
            InvalidRequest: names the field and what is wrong with it.
        """
        if model not in ("", served := self._config.model.name):
            raise ModelNotFound(f"model {model!r} is not served here; {served!r} is")
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(
                "request_id", f"is {len(request_id)} characters, at most {MAX_REQUEST_ID_CHARS}"
            )
        token_ids = self._tokens(prompt)
        room = self._room(len(token_ids))
        self._check_vocabulary("sampling.stop_token_ids", sampling.stop_token_ids)
        sampling = replace(
            sampling,
            max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
        )
        return Request(request_id or uuid.uuid4().hex, token_ids, sampling)

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
