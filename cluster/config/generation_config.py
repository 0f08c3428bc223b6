"""generation_config.json: a model's recommended sampling settings."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...proto.errors import InvalidRequest, ModelLoadError
from ...proto.sampling import SamplingDefaults, check_sampling_settings

FILE_NAME = "generation_config.json"


def read_generation_config(model: Path) -> dict[str, Any]:
    """Return the file's content; empty if there is no file. Raises ModelLoadError if it cannot be read."""
    file = model / FILE_NAME
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file}: holds no JSON object")
    return content


def sampling_defaults(content: dict[str, Any], model: Path) -> SamplingDefaults:
    """Return the defaults of sampling settings that a request leaves out.

    As in vLLM, the file's ``do_sample`` and lengths are ignored: a request turns sampling off by its temperature, and
    sets the length of its output itself.

    Raises:
        ModelLoadError: a setting is not a number or out of its range.
    """
    given: dict[str, Any] = {}
    for field in fields(SamplingDefaults):
        value = content.get(field.name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{model / FILE_NAME}: {field.name} is {value!r}, must be a number")
        given[field.name] = int(value) if field.name == "top_k" else float(value)
    defaults = SamplingDefaults(**given)
    try:
        check_sampling_settings(defaults, FILE_NAME)
    except InvalidRequest as error:
        raise ModelLoadError(f"{model}: {error}") from error
    return defaults
