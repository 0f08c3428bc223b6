"""Fields that a Hugging Face configuration must have, and the check of the numbers in a spec that is read from it."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError


def required(model: ModelConfig, field: str) -> Any:
    """Return a setting. Raises ConfigError if it is missing."""
    if model.hf.get(field) is None:
        raise ConfigError(f"{model.name}: its config.json lacks {field!r}")
    return model.hf[field]


def uniform(model: ModelConfig, field: str) -> Any:
    """Return a setting that some configurations have for each layer. Raises ConfigError if layers differ."""
    value = required(model, field)
    if not isinstance(value, list):
        return value
    if not value or value.count(value[0]) != len(value):
        raise ConfigError(f"{model.name}: {field} differs between layers, which is not supported")
    return value[0]


MAX_NUMBER = (1 << 31) - 1


def check_numbers(spec: Any) -> None:
    """Check the numbers of a dataclass, and of those in it, by the annotations of its fields.

    Raises:
        ValueError: a number has another type, or is not from 0 to MAX_NUMBER or not finite; names the field.
    """
    for field in fields(spec):
        _check(f"{type(spec).__name__}.{field.name}", str(field.type), getattr(spec, field.name))


def _check(name: str, kind: str, value: Any) -> None:
    """Check a field, or an element of one; `kind` is its annotation, or the rest of it from its element on."""
    if is_dataclass(value):
        check_numbers(value)
    elif kind.startswith("dict") and isinstance(value, dict):
        for each in value.values():
            _check(name, "", each)
    elif kind.startswith("tuple") and isinstance(value, tuple):
        for each in value:
            _check(name, kind.removeprefix("tuple["), each)
    elif value is None and kind.endswith("None"):
        return
    elif kind.startswith("int") and not (isinstance(value, int) and 0 <= value <= MAX_NUMBER):
        raise ValueError(f"{name} is {value!r:.100}, must be a whole number from 0 to {MAX_NUMBER}")
    elif kind.startswith("float") and not (isinstance(value, int | float) and math.isfinite(value)):
        raise ValueError(f"{name} is {value!r:.100}, must be a finite number")
