"""generation_config.json: a model's recommended sampling settings and its end-of-sequence tokens."""

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


def end_token_ids(content: dict[str, Any], config_eos: object, model: Path) -> tuple[int, ...]:
    """Return the ids of the tokens that end a sequence. The file overrides config.json, as in transformers.

    Args:
        content: content of generation_config.json.
        config_eos: ``eos_token_id`` of config.json.
        model: the model directory, for errors.

    Raises:
        ModelLoadError: the entry is neither a token id nor a list of them.
    """
    ids = content.get("eos_token_id", config_eos)
    if ids is None:
        return ()
    ids = [ids] if isinstance(ids, int) else ids
    if not isinstance(ids, list) or not all(isinstance(token_id, int) for token_id in ids):
        raise ModelLoadError(f"{model}: eos_token_id is {ids!r}, must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))


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
