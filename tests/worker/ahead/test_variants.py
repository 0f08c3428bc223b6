"""Kernel variants recorded on a GPU that is not there: those that a rank launches, which it finds compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[2] / "support"


def run_script(name: str, *arguments: str, **environment: str) -> list[str]:
    """Return the lines that a script of tests/support prints without Triton's interpreter."""
    pytest.importorskip("triton")
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [str(SUPPORT), inherited.get("PYTHONPATH", "")]
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, str(SUPPORT / name), *arguments]
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        pytest.param("llama", "", marks=pytest.mark.slow),
        pytest.param("llama", "int8_kv", marks=pytest.mark.slow),
        pytest.param("llama", "ngram", marks=pytest.mark.slow),
        pytest.param("llama", "lora", marks=pytest.mark.slow),
        pytest.param("gemma2", "", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "", marks=pytest.mark.slow),
    ],
)
def test_recorded_variants_are_those_of_a_rank(make_model: Any, kind: str, feature: str) -> None:
    """The other script computes every step on a stand-in GPU."""
    model = str(make_model(kind, num_hidden_layers=2))
    expected = {
        line.split(maxsplit=2)[2]
        for line in run_script("count_variants.py", model, feature, "ready")
        if line.startswith("variant")
    }
    found = {line.split(maxsplit=2)[2] for line in run_script("record_ahead.py", model, feature)}
    assert len(expected) > 20
    assert found == expected


@pytest.mark.slow
def test_launch_finds_the_variant_that_was_compiled_ahead(tmp_path: Path) -> None:
    lines = run_script("compile_ahead.py", TRITON_CACHE_DIR=str(tmp_path))
    compiled, launched = (line for line in lines if line.startswith("["))
    assert compiled == "[] 4"
    assert launched == "['norm._rms_norm', 'sample_full._merge_pieces', 'sample_full._score_pieces'] 4"


def test_rank_is_prepared_without_a_gpu(make_model: Any) -> None:
    """All kernels of a decoder and of its sampler, though nothing is computed."""
    model = make_model("llama", num_hidden_layers=1)
    kernels = {line.split()[1] for line in run_script("record_ahead.py", str(model), "eager")}
    assert kernels >= {"_attend_items", "_attend_chunks", "_rms_norm", "_gate_and_mul", "_score_pieces"}
