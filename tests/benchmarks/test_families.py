"""`python -m benchmarks.families` and its table on docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import figures_page
from benchmarks.families import ENGINES, KINDS, UNITS

ROOT = Path(__file__).parents[2]


def test_table_has_a_row_per_kind_with_both_engines() -> None:
    figures = {
        f"families.{kind}.{engine}.{name}": {"value": float(number), "unit": unit, "note": ""}
        for kind in KINDS
        for number, engine in enumerate(ENGINES, start=1)
        for name, unit in UNITS.items()
    }
    rows = figures_page.families(figures)[2:]
    assert rows == [f"| {kind} | 1 / 2 | 1 / 2 |" for kind in KINDS]


@pytest.mark.slow
def test_command_writes_figures_of_each_kind(tmp_path: Path) -> None:
    kinds = ["gptj", "gemma4_text", "deepseek_v3"]
    path = tmp_path / "families.json"
    command = [sys.executable, "-m", "benchmarks.families", "--quick", "--json", str(path)]
    command += ["--kinds", ",".join(kinds)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900, stdout=subprocess.DEVNULL)
    figures = json.loads(path.read_text())["figures"]
    assert len(figures) == len(kinds) * len(ENGINES) * len(UNITS)
    # transformers maps the weights, which takes no memory before the first step.
    assert all(figure["value"] > 0 or name.endswith("peak_gb_per_gb") for name, figure in figures.items())
