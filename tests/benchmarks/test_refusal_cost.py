"""The benchmark of refused calls: a short run of all its processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_benchmark_measures_gateway_and_caller(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.refusal_cost", "--calls", "20", "--json", str(path)]
    subprocess.run(command, check=True, timeout=300)
    figures = json.loads(path.read_text())["figures"]
    assert all(
        figures[f"refusal.{door}.{kind}.{who}_ms"]["value"] >= 0
        for door in ("grpc", "grpc_stream", "client", "http")
        for kind in ("asked", "remembered")
        for who in ("caller", "gateway")
    )
