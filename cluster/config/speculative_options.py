"""The option speculative_config: an object with the keys that vLLM's users write."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...proto.errors import ConfigError
from ...proto.options.option import check_names
from ...proto.options.values import in_words

METHODS = ("ngram", "draft_model", "eagle3", "mtp")
# Other names that vLLM has for methods; those of MTP heads of single architectures end with this.
_OTHER_NAMES = {"ngram_gpu": "ngram", "suffix": "ngram"}
_MTP_ENDING = "_mtp"
MAX_SPECULATIVE_TOKENS = 32

_SUBJECT = "speculative_config"
_KEYS = ("method", "model", "revision", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_UNCHANGED = "drafts never change an output"
_LIKE_TARGET = "what drafts is placed and computed like the model"
# Key of vLLM |-> why it has no meaning here.
IGNORED_KEYS: Mapping[str, str] = {
    "draft_tensor_parallel_size": "a draft model is split over the ranks like the model",
    "tensor_parallel_size": "a draft model is split over the ranks like the model",
    "disable_by_batch_size": "measured times decide when drafts are off",
    "disable_padded_drafter_batch": "drafts are not padded",
    "use_local_argmax_reduction": "drafts are sampled as the model's tokens are",
    "draft_sample_method": "drafts are sampled as the model's tokens are",
    "rejection_sample_method": _UNCHANGED,
    "acceptance_method": _UNCHANGED,
    "posterior_threshold": _UNCHANGED,
    "posterior_alpha": _UNCHANGED,
    "speculative_token_tree": "drafts are chains",
    "enforce_eager": _LIKE_TARGET,
    "quantization": "quantized checkpoints need no option",
    "moe_backend": _LIKE_TARGET,
    "attention_backend": _LIKE_TARGET,
    "max_model_len": "drafts have the context of the model",
    "code_revision": "code of a model is never loaded",
    "draft_load_config": "weights are read from safetensors files",
    "suffix_decoding_max_tree_depth": "the suffixes of prompt and output are searched at any length",
    "suffix_decoding_max_cached_requests": "outputs of earlier requests are not searched",
    "suffix_decoding_max_spec_factor": "a draft is at most as long as the suffix that it continues",
    "suffix_decoding_min_token_prob": "measured acceptance decides how many tokens are drafted",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """A valid speculative_config, with defaults filled in.

    Attributes:
        method: one of METHODS.
        model: the draft model or the EAGLE-3 head, a directory or ORG/NAME on the Hugging Face Hub. For mtp, if it is
            given, the served model itself. None for ngram.
        revision: branch, tag or commit of `model` on the hub; None for its main branch.
        ignored: keys of vLLM without a meaning here.
        num_speculative_tokens: most drafted tokens per sequence and step.
        prompt_lookup_min, prompt_lookup_max: length of the repeated text that ngram continues; None for no limit.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int | None
    model: str | None = None
    revision: str | None = None
    ignored: tuple[str, ...] = ()


def read_speculative_options(text: str) -> SpeculativeOptions:
    """Return the options of a JSON object.

    Raises:
        ConfigError: the text is not a JSON object, or a key or a value is not allowed.
    """
    try:
        given = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_SUBJECT} is {text!r}, must be a JSON object: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{_SUBJECT} is {text!r}, must be a JSON object")
    check_names(given, _SUBJECT, (*_KEYS, "parallel_drafting", *IGNORED_KEYS))
    given = {name: value for name, value in given.items() if value is not None}
    method = _read_method(given)
    if given.get("parallel_drafting"):
        raise ConfigError(
            f"{_SUBJECT}: parallel_drafting is not supported, tokens are drafted one after the other"
        )
    num_tokens = _read_count(given, "num_speculative_tokens", 5, MAX_SPECULATIVE_TOKENS)
    longest = _read_count(given, "prompt_lookup_max", None)
    shortest = _read_count(given, "prompt_lookup_min", min(2, longest or 2))
    assert num_tokens is not None
    assert shortest is not None
    if longest is not None and shortest > longest:
        raise ConfigError(
            f"{_SUBJECT}: prompt_lookup_min is {shortest}, must be at most prompt_lookup_max, {longest}"
        )
    model = _read_text(given, "model") if method != "ngram" else None
    if model is None and method in ("draft_model", "eagle3"):
        raise ConfigError(f"{_SUBJECT}: model is None, must name the model of method {method}")
    ignored = tuple(name for name in given if name in IGNORED_KEYS)
    return SpeculativeOptions(
        method, num_tokens, shortest, longest, model, _read_text(given, "revision"), ignored
    )


def warn_of_ignored(options: SpeculativeOptions) -> None:
    """Name the ignored keys in one warning, if there are some."""
    if options.ignored:
        reasons = "; ".join(f"{name} ({IGNORED_KEYS[name]})" for name in options.ignored)
        _log.warning("ignored keys of %s: %s", _SUBJECT, reasons)


def check_speculative_config(name: str, value: str) -> str | None:
    """Return why the value is not allowed; None if it is. A check of the option."""
    try:
        read_speculative_options(value)
    except ConfigError as error:
        return str(error)
    return None


def _read_method(given: Mapping[str, Any]) -> str:
    method = given.get("method") or _method_of(given.get("model"))
    if isinstance(method, str):
        method = "mtp" if method.endswith(_MTP_ENDING) else _OTHER_NAMES.get(method, method)
    if method not in METHODS:
        raise ConfigError(f"{_SUBJECT}: method is {method!r}, must be {in_words(METHODS)}")
    return str(method)


def _method_of(model: Any) -> str:
    """Return the method that a model's name stands for without a method, as in vLLM."""
    if model in ("ngram", "[ngram]"):
        return "ngram"
    return "eagle3" if isinstance(model, str) and "eagle3" in model.lower() else "draft_model"


def _read_text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{_SUBJECT}: {name} is {value!r}, must be text")


def _read_count(
    given: Mapping[str, Any], name: str, default: int | None, most: int | None = None
) -> int | None:
    value: int | None = given.get(name, default)
    is_count = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
    if not is_count or (most is not None and value is not None and value > most):
        allowed = "a whole number of at least 1" if most is None else f"a whole number from 1 to {most}"
        raise ConfigError(f"{_SUBJECT}: {name} is {value!r}, must be {allowed}")
    return value
