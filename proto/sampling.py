"""SamplingParams: how the next token is chosen and when to stop. Checked once, at the edge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_ANSWERS = 16


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request, in the words that users of vLLM know.

    Args:
        max_tokens: most tokens to generate; None: as many as the context leaves room for.
        min_tokens: end-of-sequence and stop tokens cannot be sampled before this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: sample among the k likeliest tokens; 0 for all.
        top_p: nucleus sampling (Holtzman et al., 2020): the smallest set of likeliest tokens whose
            probabilities sum to at least top_p; 1 for all.
        min_p: drop tokens less likely than min_p times the likeliest; 0 for none.
        seed: the same seed, prompt and settings give the same tokens, whatever else runs; None: one is drawn.
        stop: strings that end the text; the text is cut before the first of them.
        stop_token_ids: tokens that end the sequence, beside the model's own end-of-sequence tokens.
        ignore_eos: the model's own end-of-sequence tokens do not end the sequence.
        n: answers to the same prompt. They share its KV blocks; answer i samples with seed + i.
        best_of: answers to generate, of which the n likeliest (by summed log-probability) are given, the best
            first; None: all n are given.
        beam_width: beam search with that many beams, of which the n best are given; None: sampling. Then
            temperature, top_k, top_p, min_p and seed mean nothing.
        length_penalty: beam search divides a sequence's summed log-probability by its length to this power.
        early_stopping: beam search ends when it has beam_width complete answers, however good the open ones are.
        logprobs: number of likeliest tokens to report the log-probabilities of, beside the chosen one's;
            0: the chosen one's only; None: none. Those of the model itself, before temperature and cuts. Not
            with beam search, which reports scores.

    Raises:
        InvalidRequest: a value is out of its range; the message names both.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        # Callers may write one string or a list of them; from here on it is a tuple.
        stop: object = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_numbers()
        self._check_stops()
        self._check_answers()

    def _check_numbers(self) -> None:
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}",
        )  # fmt: skip
        _require(_in(self.temperature, 0, 100), "temperature", self.temperature, "from 0 to 100")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0")
        _require(_in(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "above 0 and at most 1")
        _require(_in(self.min_p, 0, 1), "min_p", self.min_p, "from 0 to 1")
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs", self.logprobs, f"from 0 to {MAX_LOGPROBS}",
        )  # fmt: skip
        _require(
            self.seed is None or -(1 << 63) <= self.seed < 1 << 63,
            "seed",
            self.seed,
            "a signed 64-bit number",
        )

    def _check_stops(self) -> None:
        _require(
            len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings"
        )
        for text in self.stop:
            _require(
                0 < len(text) <= MAX_STOP_STRING_CHARS,
                "stop", repr(text[:32]), f"strings of 1 to {MAX_STOP_STRING_CHARS} characters",
            )  # fmt: skip
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids", len(self.stop_token_ids), f"at most {MAX_STOP_TOKEN_IDS} tokens",
        )  # fmt: skip

    def _check_answers(self) -> None:
        _require(1 <= self.n <= MAX_ANSWERS, "n", self.n, f"from 1 to {MAX_ANSWERS}")
        for field, count in (("best_of", self.best_of), ("beam_width", self.beam_width)):
            _require(
                count is None or self.n <= count <= MAX_ANSWERS,
                field,
                count,
                f"from n, {self.n}, to {MAX_ANSWERS}",
            )
        _require(
            self.best_of is None or self.beam_width is None, "best_of", self.best_of, "unset with beam_width"
        )
        _require(_in(self.length_penalty, -10, 10), "length_penalty", self.length_penalty, "from -10 to 10")
        _require(
            isinstance(self.early_stopping, bool),
            "early_stopping",
            repr(self.early_stopping),
            "true or false",
        )
        _require(self.beam_width is None or not self.stop, "stop", self.stop, "empty with beam_width")
        _require(
            self.beam_width is None or self.logprobs is None,
            "logprobs",
            self.logprobs,
            "unset with beam_width",
        )

    @property
    def num_sequences(self) -> int:
        """Answers that are generated, whether or not they are given."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """The likeliest answers are given: which those are is known when all have ended."""
        return self.best_of is not None and self.best_of > 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _in(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _require(holds: bool, field: str, given: Any, allowed: str) -> None:
    if not holds:
        raise InvalidRequest(f"sampling.{field}", f"is {given}, must be {allowed}")
