"""Fields that a Hugging Face configuration must have."""

from __future__ import annotations

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
