"""`quire fit` and `quire models` as functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cluster.cli.fit import fit
from quire.cluster.cli.models import models
from quire.proto.errors import ConfigError

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_fit_shows_each_parallel_size(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit(model, gpu="h200", gpus=4)
    shown = capsys.readouterr().out
    # Facts of the published model: 8.2 B parameters, 144 KiB of KV per token.
    assert "8.19 B parameters, 15.3 GiB of weights, context of 40,960 tokens" in shown
    rows = [line.split("│")[1:-1] for line in shown.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["1", "2", "4"]
    assert [row[2].strip() for row in rows] == ["144.0 KiB", "72.0 KiB", "36.0 KiB"]


def test_fit_fails_if_no_size_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="does not fit on 1 x t4"):
        fit(model, gpu="t4", gpus=1)
    assert "does not fit" in capsys.readouterr().out


def test_models_lists_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    models()
    shown = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in shown
    assert "GPT2LMHeadModel" in shown
