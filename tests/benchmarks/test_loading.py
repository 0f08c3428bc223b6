"""`python -m benchmarks.loading` and its table on docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import figures_page
from benchmarks.loading import FORMATS

ROOT = Path(__file__).parents[2]


def test_table_has_a_row_per_format_with_the_engines_that_load_it() -> None:
    values = {"stored_gb": 0.5}
    for engine, value in (("quire", 1.0), ("transformers", 2.0)):
        values |= {f"{engine}.load_s_per_gb": value, f"{engine}.peak_gb_per_gb": value}
    figures = {
        f"loading.{name}.{key}": {"value": value}
        for name, chosen in FORMATS.items()
        for key, value in values.items()
        if key == "stored_gb" or key.split(".")[0] in chosen.engines
    }
    rows = figures_page.loading(figures)[2:]
    assert rows[0] == "| float32 | 0.5 | 1 / 2 | 1 / 2 |"
    assert rows[-1] == "| nvfp4 | 0.5 | 1 | 1 |"
    assert len(rows) == len(FORMATS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_command_writes_figures_of_each_engine(tmp_path: Path) -> None:
    path = tmp_path / "loading.json"
    command = [sys.executable, "-m", "benchmarks.loading", "--model", "s", "--formats", "bfloat16,awq"]
    command += ["--repeats", "1"]
    subprocess.run(
        [*command, "--json", str(path)], cwd=ROOT, check=True, timeout=900, stdout=subprocess.DEVNULL
    )
    figures = json.loads(path.read_text())["figures"]
    assert len(figures) == 2 + 2 * 3
    assert all(figure["value"] > 0 for figure in figures.values())
