"""`quire calibrate` with several ranks, which this process drives instead of their scheduler."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
from deadlines import COMMAND_TIMEOUT_S

from quire.cluster.simulation.step_time import read_coefficients


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
