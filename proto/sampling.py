"""SamplingParams: how the next token is chosen and when to stop. Checked once, at the edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

from . import coerce as plain
from .coerce import BadWord
from .errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_ANSWERS = 16
# A logit that is divided by much less leaves float32. An exact number in float32, in which penalties travel.
MIN_REPETITION_PENALTY = 1 / 128
MAX_REPETITION_PENALTY = 100.0
MAX_OUTPUT_PENALTY = 2.0
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
# Of a value that is refused: an error must fit into a gRPC trailer, whatever was given.
MAX_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request leaves a setting unset: the model's own choice, or what changes nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def under(self, params: SamplingParams) -> SamplingDefaults:
        """The settings as `params` has them, and these where it has none."""
        given = {field.name: getattr(params, field.name) for field in fields(self)}
        return replace(self, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request, in the words that users of vLLM know.

    temperature, top_k, top_p, min_p and repetition_penalty are the model's own where they are None: those that its
    generation_config.json recommends, otherwise 1, 0, 1, 0 and 1.

    Logits are changed in the order of transformers' processors: logit_bias, repetition_penalty, then
    frequency_penalty and presence_penalty (which transformers lacks), bad_words, min_tokens, allowed_token_ids;
    then temperature, top_k, top_p and min_p decide what is drawn from.

    Numbers may be numpy's, and a sequence a list, one string alone or None for an empty one: all become plain values
    of Python's.

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
        logprobs: number of likeliest tokens to report the log-probabilities of, beside the chosen one's;
            0: the chosen one's only; None: none. Those of the model itself, before anything is changed. Not
            with beam search, which reports scores.
        n: answers to the same prompt. They share its KV blocks; answer i samples with seed + i.
        best_of: answers to generate, of which the n likeliest (by summed log-probability) are given, the best
            first; None: all n are given.
        beam_width: beam search with that many beams, of which the n best are given; None: sampling. Then
            temperature, top_k, top_p, min_p and seed mean nothing, and nothing may change the logits.
        length_penalty: beam search divides a sequence's summed log-probability by its length to this power.
        early_stopping: beam search ends when it has beam_width complete answers, however good the open ones are.
        repetition_penalty: logits of tokens of the prompt or the answer are divided by it where they are
            positive and multiplied by it where they are not (Keskar et al., 2019); above 1 makes repeats rarer.
        frequency_penalty: taken off a token's logit for each time that it is in the answer.
        presence_penalty: taken off a token's logit once it is in the answer.
        logit_bias: token id |-> what is added to its logit. From here on pairs, by token id.
        bad_words: what the answer must not contain, each as text or as token ids. Text is forbidden both with
            and without a space before it, in the tokens that the tokenizer spells it with.
        allowed_token_ids: the only tokens that may be sampled, those that end the answer included; None: all.
        prompt_logprobs: as logprobs, for the tokens of the prompt; all of it is computed then, whatever the
            prefix cache has. None: none.
        skip_special_tokens: the text leaves out the tokenizer's special tokens.
        include_stop_str_in_output: the text keeps the stop string or stop token that ended it.
        truncate_prompt_tokens: only so many tokens at the end of the prompt are used; None: all.

    Raises:
        InvalidRequest: a value is out of its range; the message names both.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
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
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[BadWord, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for field, read in _READERS.items():
            value = getattr(self, field)
            if value is not None or field in _NEVER_NONE:
                object.__setattr__(self, field, read(f"sampling.{field}", value))
        self._check_numbers()
        self._check_stops()
        self._check_constraints()
        self._check_answers()

    def _check_numbers(self) -> None:
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}",
        )  # fmt: skip
        check_sampling_settings(SamplingDefaults().under(self), "sampling")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            _require(count is None or 0 <= count <= MAX_LOGPROBS, field, count, f"from 0 to {MAX_LOGPROBS}")
        kept = self.truncate_prompt_tokens
        _require(kept is None or kept >= 1, "truncate_prompt_tokens", kept, "at least 1")

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

    def _check_constraints(self) -> None:
        for field in ("frequency_penalty", "presence_penalty"):
            penalty, most = getattr(self, field), MAX_OUTPUT_PENALTY
            _require(_in(penalty, -most, most), field, penalty, f"from {-most:g} to {most:g}")
        biases, allowed = self.bias_pairs, self.allowed_token_ids
        _require(
            len(biases) <= MAX_LOGIT_BIASES, "logit_bias", len(biases), f"at most {MAX_LOGIT_BIASES} tokens"
        )
        for token_id, bias in biases:
            most = MAX_LOGIT_BIAS
            _require(_in(bias, -most, most), f"logit_bias[{token_id}]", bias, f"from {-most:g} to {most:g}")
        self._check_bad_words()
        _require(
            allowed is None or 0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS,
            "allowed_token_ids", f"{len(allowed or ())} tokens", f"1 to {MAX_ALLOWED_TOKEN_IDS} tokens",
        )  # fmt: skip

    def _check_bad_words(self) -> None:
        texts = [word for word in self.bad_words if isinstance(word, str)]
        # A text has two spellings at most, which take its place once it is tokenised.
        num_spellings = len(self.bad_words) + len(texts)
        _require(
            num_spellings <= 2 * MAX_BAD_WORDS,
            "bad_words", f"{len(self.bad_words)} words", f"at most {MAX_BAD_WORDS} words",
        )  # fmt: skip
        for word in self.bad_words:
            is_text = isinstance(word, str)
            most = MAX_BAD_WORD_CHARS if is_text else MAX_BAD_WORD_TOKENS
            num_parts = len(word.strip()) if isinstance(word, str) else len(word)
            unit = "characters" if is_text else "tokens"
            _require(0 < num_parts <= most, "bad_words", repr(word[:32]), f"words of 1 to {most} {unit}")

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
        _require(self.beam_width is None or not self.stop, "stop", self.stop, "empty with beam_width")
        self._check_goes_with_beams()

    def _check_goes_with_beams(self) -> None:
        """What a beam search ranks by is the model's own probabilities."""
        unchanged: dict[str, tuple[object, ...]] = {
            "logprobs": (None,),
            "repetition_penalty": (None, 1),
            "frequency_penalty": (0,),
            "presence_penalty": (0,),
            "logit_bias": ((),),
            "bad_words": ((),),
            "allowed_token_ids": (None,),
        }
        for field, values in unchanged.items():
            given = getattr(self, field)
            _require(self.beam_width is None or given in values, field, given, "unset with beam_width")

    @property
    def num_sequences(self) -> int:
        """Answers that are generated, whether or not they are given."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """The likeliest answers are given: which those are is known when all have ended."""
        return self.best_of is not None and self.best_of > 1

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as (token id, value), by token id."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    def with_defaults(self, defaults: SamplingDefaults) -> SamplingParams:
        """The same settings, with these where it leaves them open; a beam search has no use for them."""
        return self if self.beam_width is not None else replace(self, **asdict(defaults.under(self)))


def check_sampling_settings(settings: SamplingDefaults, owner: str) -> None:
    """Raises InvalidRequest, which names a setting of `owner`, where it is out of its range."""
    s = settings
    _require(_in(s.temperature, 0, 100), "temperature", s.temperature, "from 0 to 100", owner)
    _require(s.top_k >= 0, "top_k", s.top_k, "at least 0", owner)
    _require(_in(s.top_p, 0, 1) and s.top_p > 0, "top_p", s.top_p, "above 0 and at most 1", owner)
    _require(_in(s.min_p, 0, 1), "min_p", s.min_p, "from 0 to 1", owner)
    _require(
        _in(s.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "repetition_penalty", s.repetition_penalty,
        f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}", owner,
    )  # fmt: skip


def _in(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _require(holds: bool, field: str, given: Any, allowed: str, owner: str = "sampling") -> None:
    if not holds:
        shown = str(given)
        if len(shown) > MAX_SHOWN_CHARS:
            shown = shown[:MAX_SHOWN_CHARS] + "..."
        raise InvalidRequest(f"{owner}.{field}", f"is {shown}, must be {allowed}")


# How each field becomes a plain value, whatever kind of number or sequence callers wrote.
_READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(
        ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "n", "best_of", "beam_width",
         "prompt_logprobs", "truncate_prompt_tokens"),
        plain.whole_number,
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "length_penalty", "repetition_penalty", "frequency_penalty",
         "presence_penalty"),
        plain.real_number,
    ),
    **dict.fromkeys(
        ("ignore_eos", "early_stopping", "skip_special_tokens", "include_stop_str_in_output"), plain.flag
    ),
    "stop": plain.texts,
    "stop_token_ids": plain.token_ids,
    "logit_bias": plain.biases,
    "bad_words": plain.bad_words,
    "allowed_token_ids": plain.distinct_token_ids,
}  # fmt: skip
# Fields in which None does not stand for something that is left open.
_NEVER_NONE = {
    member.name
    for member in fields(SamplingParams)
    if member.default is not None and member.name != "max_tokens"
}
