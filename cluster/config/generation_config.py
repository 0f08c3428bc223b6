"""generation_config.json: how a model's makers recommend to generate with it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...proto.errors import InvalidRequest, ModelLoadError
from ...proto.sampling import SamplingDefaults, check_sampling_settings

FILE_NAME = "generation_config.json"


def read_generation_config(model: Path) -> dict[str, Any]:
    """What the model directory's file says; empty without one. Raises ModelLoadError where it cannot be read."""
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


def end_token_ids(content: dict[str, Any], of_model: object, model: Path) -> tuple[int, ...]:
    """The tokens that end a sequence. The file has the last word, as in transformers.

    Args:
        content: of the file.
        of_model: ``eos_token_id`` of config.json.
    """
    ids = content.get("eos_token_id", of_model)
    if ids is None:
        return ()
    ids = [ids] if isinstance(ids, int) else ids
    if not isinstance(ids, list) or not all(isinstance(token_id, int) for token_id in ids):
        raise ModelLoadError(f"{model}: eos_token_id is {ids!r}, must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def sampling_defaults(content: dict[str, Any], model: Path) -> SamplingDefaults:
    """What holds where a request says nothing; settings that the file leaves out change nothing.

    As in vLLM neither its ``do_sample`` nor its lengths are taken over: a request says by its temperature that it
    wants no sampling, and how long its answer may be.
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
