"""Texts on which a model's tokenizer fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quire.cluster.text.requests.tokenizer import Tokenizer
from quire.proto.errors import InvalidRequest, ModelLoadError


def test_text_on_which_the_tokenizer_panics_is_refused(demo_model_dir: Path, tmp_path: Path) -> None:
    """Rust's panics are no Exception; this one is of a regular expression that backtracks for long."""
    shutil.copytree(demo_model_dir, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    file.write_text(json.dumps(tokenizer))
    hostile = Tokenizer(str(tmp_path / "model"))
    assert hostile.encode("a" * 5)
    with pytest.raises(InvalidRequest, match=r"prompt: cannot be tokenized: .*retry-limit"):
        hostile.encode("a" * 30 + "c")


def test_text_on_which_the_tokenizer_fails_is_refused(demo_model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_model_dir, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"] = {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": {"a": 0},
    }  # fmt: skip
    tokenizer["added_tokens"] = []
    file.write_text(json.dumps(tokenizer))
    lacking = Tokenizer(str(tmp_path / "model"))
    assert lacking.encode("a", add_special_tokens=False) == [0]
    with pytest.raises(
        InvalidRequest, match=r"prompt: cannot be tokenized: WordPiece error: Missing \[UNK\]"
    ):
        lacking.encode("b")


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "gemma"])
def test_tokenizer_that_transformers_makes_of_nothing_is_refused(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelLoadError, match="has no tokens"):
        Tokenizer(str(tmp_path))
