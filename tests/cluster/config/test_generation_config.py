"""generation_config.json gives sampling defaults, and bad values raise ModelLoadError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.config.model_config import read_generation_config, sampling_defaults
from quire.proto.errors import ModelLoadError
from quire.proto.sampling import SamplingDefaults


def write(model: Path, content: Any) -> dict[str, Any]:
    (model / "generation_config.json").write_text(json.dumps(content))
    return read_generation_config(model)


def test_missing_file_gives_the_usual_defaults(tmp_path: Path) -> None:
    content = read_generation_config(tmp_path)
    assert sampling_defaults(content, tmp_path) == SamplingDefaults()


def test_recommended_settings_become_defaults(tmp_path: Path) -> None:
    recommended = {
        "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "min_p": None,
        "max_new_tokens": 7, "max_length": 9, "eos_token_id": [1, 2], "bos_token_id": 3,
    }  # fmt: skip
    content = write(tmp_path, recommended)
    assert sampling_defaults(content, tmp_path) == SamplingDefaults(0.6, 20, 0.95, 0.0, 1.05)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is not a JSON object"),
        ({"temperature": "hot"}, "temperature is 'hot', must be a number"),
        ({"top_k": True}, "top_k is True, must be a number"),
        ({"top_k": float("inf")}, "top_k is inf, must be a number of at most 2147483647"),
        ({"top_k": float("nan")}, "top_k is nan, must be a number"),
        ({"top_k": 2**31}, "top_k is 2147483648, must be a number"),
        ({"temperature": 10**400}, "temperature is 1000.*, must be a number"),
        ({"top_p": 1.5}, r"generation_config.json.top_p: is 1.5, must be above 0 and at most 1"),
        ({"repetition_penalty": 0}, r"generation_config.json.repetition_penalty: is 0.0"),
    ],
)
def test_bad_setting_raises_model_load_error(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        sampling_defaults(write(tmp_path, content), tmp_path)
