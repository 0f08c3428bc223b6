"""SamplingParams: sampling and stop settings of a request, validated once, at the edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from dataclasses import field as declare
from enum import IntEnum
from typing import Any, cast, get_args, get_type_hints

from . import coerce as plain
from .coerce import BadWord
from .errors import InvalidRequest
from .later_fields import sent_if_set
from .structured_outputs import RepetitionDetectionParams, StructuredOutputsParams

# As `top_k`, `logprobs` and `prompt_logprobs`: all tokens, as in vLLM.
_UNBOUNDED = -1
# As a request's `seed`: none, as in vLLM. Output i samples with seed + i, which may be -1, so only RequestChecker
# reads it this way.
RANDOM_SEED = -1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_OUTPUTS = 16
# Dividing a logit by much less overflows float32. Exactly representable in float32, the type of penalties on a rank.
MIN_REPETITION_PENALTY = 1 / 128
MAX_REPETITION_PENALTY = 100.0
MAX_OUTPUT_PENALTY = 2.0
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_EXTRA_ARGS = 8
MAX_EXTRA_ARGS_CHARS = 1 << 16
# Of an invalid value in an error: the error must fit into a gRPC trailer.
MAX_SHOWN_CHARS = 200


def _limited(default: float, allowed: str, holds: Callable[[float], bool]) -> Any:
    """Declare a setting with its limits, which `check_sampling_settings` checks."""
    return declare(default=default, metadata={"allowed": allowed, "holds": holds})


class RequestOutputKind(IntEnum):
    """Parts of an output that an engine returns while it is generated, as in vLLM.

    CUMULATIVE: all tokens so far. DELTA: the new tokens. FINAL_ONLY: all tokens, once the request has ended.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Settings for values that a request leaves unset: the model's, or by default those without effect."""

    temperature: float = _limited(1.0, "from 0 to 100", lambda value: _in(value, 0, 100))
    top_k: int = _limited(0, "at least 0, or -1 for all", lambda value: value >= _UNBOUNDED)
    top_p: float = _limited(1.0, "above 0 and at most 1", lambda value: _in(value, 0, 1) and value > 0)
    min_p: float = _limited(0.0, "from 0 to 1", lambda value: _in(value, 0, 1))
    repetition_penalty: float = _limited(
        1.0,
        f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}",
        lambda value: _in(value, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    )

    def under(self, params: SamplingParams) -> SamplingDefaults:
        """Return the settings of `params`, with these for values that it leaves unset."""
        given = {name: value for name in _DEFAULTED if (value := getattr(params, name)) is not None}
        return replace(self, **given) if given else self


# With dataclasses.fields and asdict, `SamplingParams.with_defaults` took 39 us instead of 23 (AMD EPYC).
_DEFAULTED = tuple(member.name for member in fields(SamplingDefaults))
_LIMITS = [
    (member.name, member.metadata["holds"], member.metadata["allowed"]) for member in fields(SamplingDefaults)
]


@dataclass(slots=True)
class SamplingParams:
    """Sampling settings of one request, named as in vLLM.

    Fields may be set later. They are checked when the object is made and again with each request that uses it.

    temperature, top_k, top_p, min_p and repetition_penalty of None stand for the model's defaults: the values in its
    generation_config.json, or else 1, 0, 1, 0 and 1.

    Logits are processed in the order of transformers: logit_bias, repetition_penalty, frequency_penalty and
    presence_penalty (which transformers lacks), bad_words, min_tokens, allowed_token_ids, temperature, top_k, top_p,
    min_p.

    Numbers may be numpy's. A sequence may be a list, a single string, or None if it is empty. All are stored as plain
    Python values.

    Args:
        max_tokens: maximum number of tokens to generate; None to use the rest of the context.
        min_tokens: before this many tokens, end-of-sequence and stop tokens cannot be sampled and stop strings do
            not end the text.
        temperature: divides the logits; 0 for greedy decoding.
        top_k: sample among the k most likely tokens; 0 or -1 for all.
        top_p: nucleus sampling (Holtzman et al., 2020): sample among the smallest set of most likely tokens whose
            probabilities sum to at least top_p; 1 for all.
        min_p: drop tokens less likely than min_p times the most likely one; 0 for none.
        seed: equal seed, prompt and settings give equal tokens, whatever else runs: on a CPU, and up to the rounding
            of products on a GPU (docs/limits.md); None or -1 for a random seed.
        stop: strings that end the text, which is cut before the first of them.
        stop_token_ids: tokens that end the sequence, beside the model's end-of-sequence tokens.
        ignore_eos: do not end the sequence at the model's end-of-sequence tokens.
        logprobs: number of most likely tokens whose log-probabilities are reported beside the sampled one's; 0 for
            the sampled one's only; -1 for the whole vocabulary; None for none. The engine option max_logprobs limits
            it. Taken from the model's logits before any processing. Not available with beam search, which reports
            scores.
        n: number of outputs for the prompt. They share its KV blocks; output i samples with seed + i.
        best_of: number of outputs to generate, of which the n most likely (by summed log-probability) are returned,
            best first; None to return all n.
        beam_width: beam search with this number of beams, of which the n best are returned; None for sampling. Beam
            search ignores temperature, top_k, top_p, min_p and seed. It allows structured_outputs and no other
            logits processor.
        length_penalty: beam search divides a sequence's summed log-probability by its length to this power.
        early_stopping: end beam search at beam_width complete outputs, even if unfinished beams could score higher.
        repetition_penalty: divides positive logits, and multiplies negative logits, of tokens in the prompt or the
            output (Keskar et al., 2019); above 1 makes repeats rarer.
        frequency_penalty: subtracted from a token's logit for each of its occurrences in the output.
        presence_penalty: subtracted from a token's logit if the token is in the output.
        logit_bias: token id |-> number added to its logit. Stored as pairs sorted by token id.
        bad_words: words that the output must not contain, each as text or as token ids. Text is forbidden with and
            without a leading space, in the tokenizer's own spelling.
        allowed_token_ids: the only tokens that may be sampled, tokens that end the output included; None for all.
        prompt_logprobs: as logprobs, for the prompt's tokens; computes the whole prompt, without the prefix cache.
            None for none.
        skip_special_tokens: leave the tokenizer's special tokens out of the text.
        include_stop_str_in_output: keep the stop string or stop token at the end of the text.
        truncate_prompt_tokens: use only this many tokens at the end of the prompt; -1 for as many as the context
            holds beside max_tokens; None for all.
        detokenize: False leaves the text empty, and log-probabilities without the tokens' text. Stop strings need
            the text.
        structured_outputs: the constraint on the output, once the reasoning of a chat has ended. Excludes
            bad_words and allowed_token_ids. The tokens that end the output ignore min_tokens once nothing else is
            allowed.
        thinking_token_budget: most tokens of the reasoning of a chat, which is ended after them; None or -1 for no
            limit.
        repetition_detection: ends an output that repeats itself, with the finish reason ``repetition``; None for
            outputs that may repeat themselves.
        extra_args: name of a custom logits processor |-> its arguments, a value of JSON. The engine option
            logits_processors must have the name. They see the logits before all that is named above. Stored as pairs
            of name and JSON text.
        spaces_between_special_tokens: without effect: tokenizers of the tokenizers library put none there.
        output_kind: of `AsyncLLMEngine` and `LLMEngine`; LLM and the clients return whole outputs.
        flat_logprobs: log-probabilities in the outputs of LLM and its engines are a FlatLogprobs instead of a list.
        logprob_token_ids: refused: use logprobs=-1, which has the log-probabilities of all tokens.

    Raises:
        InvalidRequest: a value is out of range; the message names the value and the range.
    """

    max_tokens: int | None = 16
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
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = sent_if_set(None)
    thinking_token_budget: int | None = sent_if_set(None)
    repetition_detection: RepetitionDetectionParams | None = sent_if_set(None)
    extra_args: Mapping[str, Any] | tuple[tuple[str, str], ...] = sent_if_set(())
    # Of the caller's process alone; see DELIVERY.
    spaces_between_special_tokens: bool = sent_if_set(True)
    output_kind: RequestOutputKind = sent_if_set(RequestOutputKind.CUMULATIVE)
    flat_logprobs: bool = sent_if_set(False)
    logprob_token_ids: tuple[int, ...] | None = sent_if_set(None)

    @classmethod
    def from_optional(cls, *, max_tokens: int | None = 16, **settings: Any) -> SamplingParams:
        """Return settings of which None stands for the default, as in vLLM; biases are cut to their limits."""
        given = {name: value for name, value in settings.items() if value is not None}
        if isinstance(biases := given.get("logit_bias"), Mapping):
            try:
                given["logit_bias"] = {
                    int(token_id): max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, float(bias)))
                    for token_id, bias in biases.items()
                }
            except (TypeError, ValueError) as error:
                raise InvalidRequest("sampling.logit_bias", f"must have numbers: {error}") from None
        return cls(max_tokens=max_tokens, **given)

    def __post_init__(self) -> None:
        for field, convert in _CONVERTERS.items():
            value = getattr(self, field)
            if value is not _DEFAULT_OF[field] and (value is not None or field in _NEVER_NONE):
                setattr(self, field, convert(f"sampling.{field}", value))
        self.top_k = 0 if self.top_k == _UNBOUNDED else self.top_k
        self._check_numbers()
        self._check_constraints()
        self._check_stops()
        self._check_logits_processors()
        self._check_outputs()

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
            _require(count is None or count >= _UNBOUNDED, field, count, "at least 0, or -1 for all tokens")
        kept = self.truncate_prompt_tokens
        _require(
            kept is None or kept >= 1 or kept == _UNBOUNDED,
            "truncate_prompt_tokens", kept, "at least 1, or -1 for the context",
        )  # fmt: skip

    def _check_constraints(self) -> None:
        if self.thinking_token_budget == _UNBOUNDED:
            self.thinking_token_budget = None
        budget = self.thinking_token_budget
        _require(
            budget is None or budget >= 0, "thinking_token_budget", budget, "at least 0, or -1 for no limit"
        )
        _require(
            self.logprob_token_ids is None,
            "logprob_token_ids", self.logprob_token_ids, "unset: use logprobs=-1, for all tokens",
        )  # fmt: skip
        if self.structured_outputs is None:
            return
        # Together, these may leave no token that can be sampled.
        _require(
            not self.bad_words, "bad_words", f"{len(self.bad_words)} words", "unset with structured_outputs"
        )
        allowed = self.allowed_token_ids
        _require(
            allowed is None,
            "allowed_token_ids", f"{len(allowed or ())} tokens", "unset with structured_outputs",
        )  # fmt: skip

    def _check_stops(self) -> None:
        _require(
            len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings"
        )
        for text in self.stop:
            _require(
                0 < len(text) <= MAX_STOP_STRING_CHARS,
                "stop", repr(text[:32]), f"strings of 1 to {MAX_STOP_STRING_CHARS} characters",
            )  # fmt: skip
        _require(not self.stop or self.detokenize, "stop", list(self.stop), "empty without detokenize")
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids", len(self.stop_token_ids), f"at most {MAX_STOP_TOKEN_IDS} tokens",
        )  # fmt: skip

    def _check_logits_processors(self) -> None:
        for field in ("frequency_penalty", "presence_penalty"):
            penalty, limit = getattr(self, field), MAX_OUTPUT_PENALTY
            _require(_in(penalty, -limit, limit), field, penalty, f"from {-limit:g} to {limit:g}")
        biases, allowed = self.bias_pairs, self.allowed_token_ids
        _require(
            len(biases) <= MAX_LOGIT_BIASES, "logit_bias", len(biases), f"at most {MAX_LOGIT_BIASES} tokens"
        )
        for token_id, bias in biases:
            limit = MAX_LOGIT_BIAS
            _require(
                _in(bias, -limit, limit), f"logit_bias[{token_id}]", bias, f"from {-limit:g} to {limit:g}"
            )
        self._check_bad_words()
        self._check_extra_args()
        _require(
            allowed is None or 0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS,
            "allowed_token_ids", f"{len(allowed or ())} tokens", f"1 to {MAX_ALLOWED_TOKEN_IDS} tokens",
        )  # fmt: skip

    def _check_extra_args(self) -> None:
        pairs = self.extra_arg_pairs
        _check_num_processors(len(pairs))
        num_chars = sum(len(name) + len(text) for name, text in pairs)
        allowed = f"at most {MAX_EXTRA_ARGS_CHARS} characters of JSON"
        _require(num_chars <= MAX_EXTRA_ARGS_CHARS, "extra_args", f"{num_chars} characters of JSON", allowed)

    def _check_bad_words(self) -> None:
        texts = [word for word in self.bad_words if isinstance(word, str)]
        # The tokenizer replaces each text by up to two spellings as token ids.
        num_spellings = len(self.bad_words) + len(texts)
        _require(
            num_spellings <= 2 * MAX_BAD_WORDS,
            "bad_words", f"{len(self.bad_words)} words", f"at most {MAX_BAD_WORDS} words",
        )  # fmt: skip
        for word in self.bad_words:
            is_text = isinstance(word, str)
            max_parts = MAX_BAD_WORD_CHARS if is_text else MAX_BAD_WORD_TOKENS
            num_parts = len(word.strip()) if isinstance(word, str) else len(word)
            unit = "characters" if is_text else "tokens"
            allowed = f"words of 1 to {max_parts} {unit}"
            _require(0 < num_parts <= max_parts, "bad_words", repr(word[:32]), allowed)

    def _check_outputs(self) -> None:
        _require(1 <= self.n <= MAX_OUTPUTS, "n", self.n, f"from 1 to {MAX_OUTPUTS}")
        for field, count in (("best_of", self.best_of), ("beam_width", self.beam_width)):
            _require(
                count is None or self.n <= count <= MAX_OUTPUTS,
                field,
                count,
                f"from n, {self.n}, to {MAX_OUTPUTS}",
            )
        _require(
            self.best_of is None or self.beam_width is None, "best_of", self.best_of, "unset with beam_width"
        )
        _require(_in(self.length_penalty, -10, 10), "length_penalty", self.length_penalty, "from -10 to 10")
        _require(self.beam_width is None or not self.stop, "stop", self.stop, "empty with beam_width")
        self._check_unset_with_beams()

    def _check_unset_with_beams(self) -> None:
        """Refuse logits processors with beam search, which ranks by the model's own probabilities.

        Constraints are allowed: they exclude tokens and leave the others' probabilities as they are.
        """
        if self.beam_width is None:
            return
        unset: dict[str, tuple[object, ...]] = {
            "logprobs": (None,),
            "repetition_penalty": (None, 1),
            "frequency_penalty": (0,),
            "presence_penalty": (0,),
            "logit_bias": ((),),
            "bad_words": ((),),
            "allowed_token_ids": (None,),
            "repetition_detection": (None,),
            "extra_args": ((),),
        }
        for field, values in unset.items():
            given = getattr(self, field)
            _require(given in values, field, given, "unset with beam_width")

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated, returned or not."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """True if the outputs to return are chosen by likelihood, after all have ended."""
        return self.best_of is not None and self.best_of > 1

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as (token id, value), sorted by token id."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def extra_arg_pairs(self) -> tuple[tuple[str, str], ...]:
        """extra_args as (name, JSON text), sorted by name."""
        return cast(tuple[tuple[str, str], ...], self.extra_args)

    def clone(self) -> SamplingParams:
        """Return a copy, with the fields checked."""
        return replace(self)

    def with_defaults(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the settings with `defaults` for unset values; unchanged for beam search, which ignores them."""
        values = self.defaulted_values(defaults)
        return replace(self, **values) if values else self

    def defaulted_values(self, defaults: SamplingDefaults) -> dict[str, Any]:
        """Return field |-> value of the fields that `with_defaults` sets."""
        if self.beam_width is not None:
            return {}
        settings = defaults.under(self)
        return {name: getattr(settings, name) for name in _DEFAULTED}


def check_sampling_settings(settings: SamplingDefaults, owner: str) -> None:
    """Raise InvalidRequest if a setting is out of range; `owner` precedes the setting's name in the message."""
    for name, holds, allowed in _LIMITS:
        value = getattr(settings, name)
        _require(holds(value), name, value, allowed, owner)


def _in(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _require(holds: bool, field: str, given: Any, allowed: str, owner: str = "sampling") -> None:
    if not holds:
        shown = str(given)
        if len(shown) > MAX_SHOWN_CHARS:
            shown = shown[:MAX_SHOWN_CHARS] + "..."
        raise InvalidRequest(f"{owner}.{field}", f"is {shown}, must be {allowed}")


def _check_num_processors(count: int) -> None:
    allowed = f"at most {MAX_EXTRA_ARGS} processors"
    _require(count <= MAX_EXTRA_ARGS, "extra_args", f"{count} processors", allowed)


def _extra_args(field: str, given: Any) -> tuple[tuple[str, str], ...]:
    # Arguments of thousands of processors are refused before they are encoded.
    if isinstance(given, Mapping):
        _check_num_processors(len(given))
    return plain.json_arguments(field, given)


def _output_kind(field: str, given: Any) -> RequestOutputKind:
    try:
        return RequestOutputKind(given)
    except ValueError:
        raise InvalidRequest(field, f"is {given!r}, must be a RequestOutputKind") from None


# Type of a field |-> the function that converts its value to plain Python.
_CONVERTER_OF: dict[type, Callable[[str, Any], Any]] = {
    int: plain.whole_number,
    float: plain.real_number,
    bool: plain.flag,
    StructuredOutputsParams: StructuredOutputsParams.of,
    RepetitionDetectionParams: RepetitionDetectionParams.of,
    RequestOutputKind: _output_kind,
}


# Field of several values |-> its function.
_LIST_CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "stop": plain.texts,
    "stop_token_ids": plain.token_ids,
    "logit_bias": plain.biases,
    "bad_words": plain.bad_words,
    "allowed_token_ids": plain.distinct_token_ids,
    "extra_args": _extra_args,
    "logprob_token_ids": plain.token_ids,
}
# Field of one value |-> its type, without None.
VALUE_TYPES: dict[str, Any] = {
    name: (get_args(hint) or (hint,))[0]
    for name, hint in get_type_hints(SamplingParams).items()
    if name not in _LIST_CONVERTERS
}
_CONVERTERS = {
    member.name: _LIST_CONVERTERS.get(member.name) or _CONVERTER_OF[VALUE_TYPES[member.name]]
    for member in fields(SamplingParams)
}
# field |-> its default, which is plain Python already.
_DEFAULT_OF = {member.name: member.default for member in fields(SamplingParams)}
# Fields that are converted even if they are None: None is an empty sequence or invalid.
_NEVER_NONE = {
    member.name
    for member in fields(SamplingParams)
    if member.default is not None and member.name != "max_tokens"
}
# Settings of how outputs are returned |-> their defaults, with which schedulers get them.
DELIVERY: dict[str, Any] = {
    name: _DEFAULT_OF[name] for name in ("spaces_between_special_tokens", "output_kind", "flat_logprobs")
}
