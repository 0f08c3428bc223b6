"""generation_config.json: a model's recommended sampling settings."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from ...proto.errors import InvalidRequest, ModelLoadError
from ...proto.sampling import SamplingDefaults, check_sampling_settings
from .model_checks import read_json_object

FILE_NAME = "generation_config.json"
# Of any setting, as far from 0: the others have smaller limits.
_MAX_VALUE = (1 << 31) - 1


def read_generation_config(model: Path) -> dict[str, Any]:
    """Return the file's content; empty if there is no file. Raises ModelLoadError if it cannot be read."""
    return read_json_object(model / FILE_NAME)


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
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= _MAX_VALUE:
            raise ModelLoadError(
                f"{model / FILE_NAME}: {field.name} is {value!r:.100}, must be a number of at most {_MAX_VALUE}"
            )
        given[field.name] = int(value) if field.name == "top_k" else float(value)
    defaults = SamplingDefaults(**given)
    try:
        check_sampling_settings(defaults, FILE_NAME)
    except InvalidRequest as error:
        raise ModelLoadError(f"{model}: {error}") from error
    return defaults
