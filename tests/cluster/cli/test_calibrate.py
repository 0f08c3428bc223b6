"""`quire calibrate` with several ranks, which it drives instead of their scheduler, and with recorded steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
from deadlines import COMMAND_TIMEOUT_S
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cluster.cli import app
from quire.cluster.simulation.step_time import read_coefficients
from quire.scheduler import read_steps


@pytest.mark.cluster
def test_steps_of_two_ranks_are_measured(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """In a process of its own, since Ray has one instance per process."""
    path = tmp_path / "cpu.json"
    command = [
        sys.executable, "-m", "quire", "calibrate", str(make_model("llama")), "--tensor-parallel-size", "2",
        "--num-kv-blocks", "65", "--max-num-seqs", "2", "--repeats", "1", "--output", str(path),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(path.read_text())["steps"] > 100
    found = read_coefficients(path, "cpu")
    assert sum(astuple(found)) > 0


def test_steps_that_an_engine_recorded_are_fitted(make_model: Callable[..., Path], tmp_path: Path) -> None:
    model, folder, output = str(make_model("llama")), tmp_path / "steps", tmp_path / "cpu.json"
    folder.mkdir()
    prompts = [[5 + place % 50 for place in range(length)] for length in (4, 60, 25, 90)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(
        model, device="cpu", dtype="float32", max_num_seqs=2, num_kv_blocks=65, record_steps=str(folder)
    ) as llm:
        llm.generate(prompts, params)
    (path,) = folder.iterdir()
    command = [
        "calibrate",
        model,
        "--gpu",
        "cpu",
        "--num-kv-blocks",
        "65",
        "--steps",
        str(path),
        "--output",
        str(output),
    ]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    _, recorded = read_steps(path)
    assert json.loads(output.read_text())["steps"] + 32 == len(recorded), "the first ones are left out"
    assert sum(astuple(read_coefficients(output, "cpu"))) > 0
    refused = CliRunner().invoke(app, [*command, "--tensor-parallel-size", "2"])
    assert refused.exit_code
    assert "are of tensor_parallel_size 1, not of 2" in str(refused.exception) + refused.output
