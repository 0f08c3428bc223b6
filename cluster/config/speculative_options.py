"""The option speculative_config: an object with the keys that vLLM's users write."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...proto.errors import ConfigError
from .checks import in_words
from .option import check_names
from .value_kinds import ValueKind

METHODS = ("ngram", "draft_model", "eagle3", "mtp")
# Names of vLLM for MTP heads of some architectures.
_MTP_NAMES = ("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp")
MAX_SPECULATIVE_TOKENS = 32

_SUBJECT = "speculative_config"
_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """A valid speculative_config, with defaults filled in.

    Attributes:
        method: one of METHODS.
        model: the draft model or the EAGLE-3 head, a directory or ORG/NAME on the Hugging Face Hub; None for others.
        num_speculative_tokens: most drafted tokens per sequence and step.
        prompt_lookup_min, prompt_lookup_max: length of the repeated text that ngram continues; None for no limit.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int | None
    model: str | None = None


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
    check_names(given, _SUBJECT, _KEYS)
    given = {name: value for name, value in given.items() if value is not None}
    method = _read_method(given)
    num_tokens = _read_count(given, "num_speculative_tokens", 5, MAX_SPECULATIVE_TOKENS)
    longest = _read_count(given, "prompt_lookup_max", None)
    shortest = _read_count(given, "prompt_lookup_min", min(2, longest or 2))
    assert num_tokens is not None
    assert shortest is not None
    if longest is not None and shortest > longest:
        raise ConfigError(
            f"{_SUBJECT}: prompt_lookup_min is {shortest}, must be at most prompt_lookup_max, {longest}"
        )
    model = _read_draft_model(given, method) if method in ("draft_model", "eagle3") else None
    return SpeculativeOptions(method, num_tokens, shortest, longest, model)


def check_speculative_config(name: str, value: str) -> str | None:
    """Return why the value is not allowed; None if it is. A check of the option."""
    try:
        read_speculative_options(value)
    except ConfigError as error:
        return str(error)
    return None


def _read_method(given: Mapping[str, Any]) -> str:
    # Without a method, vLLM takes `ngram` or a draft model as the model.
    model = given.get("model")
    method = given.get("method", "ngram" if model in ("ngram", "[ngram]") else "draft_model")
    if method in _MTP_NAMES:
        return "mtp"
    if method not in METHODS:
        raise ConfigError(f"{_SUBJECT}: method is {method!r}, must be {in_words(METHODS)}")
    return str(method)


def _read_draft_model(given: Mapping[str, Any], method: str) -> str:
    model = given.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError(f"{_SUBJECT}: model is {model!r}, must name the model of method {method}")
    return model


def _read_count(
    given: Mapping[str, Any], name: str, default: int | None, most: int | None = None
) -> int | None:
    value: int | None = given.get(name, default)
    is_count = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
    if not is_count or (most is not None and value is not None and value > most):
        allowed = "a whole number of at least 1" if most is None else f"a whole number from 1 to {most}"
        raise ConfigError(f"{_SUBJECT}: {name} is {value!r}, must be {allowed}")
    return value


def _read(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    if isinstance(value, str):
        return value
    raise ValueError(value)


# A dictionary in Python and TOML, text elsewhere.
JSON_OBJECT = ValueKind("a JSON object", _read)
