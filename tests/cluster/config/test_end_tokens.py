"""The tokens that end a sequence: of generation_config.json or config.json, and of the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.config.model_config import end_token_ids
from quire.proto.errors import ModelLoadError

ENTRY = {"content": "<|im_end|>", "special": True}


def write(model: Path, name: str, content: Any) -> None:
    (model / name).write_text(json.dumps(content))


def test_generation_config_overrides_config_json(tmp_path: Path) -> None:
    assert end_token_ids({}, [5, 6, 5], tmp_path, 10) == (5, 6)
    assert end_token_ids({}, None, tmp_path, 10) == ()
    assert end_token_ids({"eos_token_id": [1, 2]}, 9, tmp_path, 10) == (1, 2)
    assert end_token_ids({"eos_token_id": None}, 9, tmp_path, 10) == ()


@pytest.mark.parametrize("token", ["<|im_end|>", ENTRY])
def test_token_of_the_tokenizer_ends_a_sequence_too(tmp_path: Path, token: Any) -> None:
    """Chat models that are fine-tuned from base models often leave that model's token in config.json."""
    settings = {"eos_token": token, "added_tokens_decoder": {"6": {"content": "<s>"}, "7": ENTRY}}
    write(tmp_path, "tokenizer_config.json", settings)
    assert end_token_ids({}, 2, tmp_path, 10) == (2, 7)
    assert end_token_ids({}, [7, 2], tmp_path, 10) == (7, 2)
    assert end_token_ids({}, 2, tmp_path, 7) == (2,), "the model has no such token"


def test_tokens_are_listed_in_tokenizer_json_too(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    assert end_token_ids({}, 2, tmp_path, 10) == (2,)
    write(tmp_path, "tokenizer.json", {"added_tokens": [ENTRY | {"id": 7}]})
    assert end_token_ids({}, 2, tmp_path, 10) == (2, 7)


@pytest.mark.parametrize("settings", [{"eos_token": None}, {"eos_token": {}}, {"eos_token": "unknown"}, {}])
def test_tokenizer_without_an_end_adds_none(tmp_path: Path, settings: dict[str, Any]) -> None:
    write(tmp_path, "tokenizer_config.json", settings)
    write(tmp_path, "tokenizer.json", {"added_tokens": [ENTRY | {"id": 7}]})
    assert end_token_ids({}, 2, tmp_path, 10) == (2,)


@pytest.mark.parametrize("key", ["²", "-1", "9" * 30, "9" * 5000, "seven", ""])
def test_key_that_is_no_token_id_adds_no_end(tmp_path: Path, key: str) -> None:
    settings = {"eos_token": "<|im_end|>", "added_tokens_decoder": {key: ENTRY}}
    write(tmp_path, "tokenizer_config.json", settings)
    assert end_token_ids({}, 2, tmp_path, 10) == (2,)


@pytest.mark.parametrize("token_id", [float("inf"), float("nan"), -1, "seven", None, [], 10**30])
def test_id_that_is_no_token_id_adds_no_end(tmp_path: Path, token_id: Any) -> None:
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    write(tmp_path, "tokenizer.json", {"added_tokens": [ENTRY | {"id": token_id}]})
    assert end_token_ids({}, 2, tmp_path, 10) == (2,)


@pytest.mark.parametrize("ids", ["end", [2, "end"], 2.0, {"a": 1}, 1 << 31, [-(1 << 31)], 10**30])
def test_eos_that_is_no_token_id_is_refused(tmp_path: Path, ids: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"eos_token_id is .*, must be a token id or a list of them"):
        end_token_ids({"eos_token_id": ids}, 2, tmp_path, 10)
