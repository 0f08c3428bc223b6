"""docs/benchmarks.md is generated from the result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import figures_page


def test_page_names_every_result_file() -> None:
    shown = {name for section in figures_page.SECTIONS for name in section.files}
    assert shown >= {path.stem for path in figures_page.RESULTS.glob("*.json")}


@pytest.mark.parametrize(
    ("value", "text"),
    [(718.7489, "718.7"), (0.0189, "0.0189"), (16383.0, "16,383"), (0.0, "0"), (-2.5, "-2.5")],
)
def test_number_has_four_significant_digits_without_exponent(value: float, text: str) -> None:
    assert figures_page._number(value) == text


def test_engine_that_did_not_finish_is_shown_with_its_time() -> None:
    figures = {
        "peers.quire.w1.output_tokens_per_s": {"value": 5.0, "unit": "tokens/s", "note": ""},
        "peers.other.w1.failed_after_s": {"value": 80.1, "unit": "s", "note": ""},
    }
    table = figures_page.engines({"60M": figures})
    assert table[-2:] == [
        "| 60M | quire | 5 |  |  |  |  |",
        "| 60M | other | not finished in 80 s |  |  |  |  |",
    ]


def test_speculation_is_shown_by_method_workload_and_number_of_sequences() -> None:
    values = {"speedup": 1.25, "acceptance": 0.5, "tokens_per_step": 2.0}
    figures = {f"speculation.ngram.quote.8.{key}": {"value": own} for key, own in values.items()}
    figures |= {f"speculation.ngram.quote.16.{key}": {"value": 0.0} for key in values}
    assert figures_page.speculation(figures)[2:] == ["| ngram | quote | 8 | 1.25 | 0.5 | 2 |"]


def test_page_shows_results_of_gpus(tmp_path: Path) -> None:
    folder = tmp_path / "h200-2026-12-01"
    folder.mkdir()
    record = {
        "stage": "engine",
        "status": "done",
        "date": "2026-12-01",
        "device": "NVIDIA H200",
        "figures": {"gpu.engine.decode.1x1024.graphs.step_ms": {"value": 4.1, "unit": "ms", "note": ""}},
        "problems": [{"case": "fp8", "error": "RuntimeError: no", "trace": ""}],
    }
    (folder / "result.json").write_text(json.dumps([record]))
    assert figures_page.NOT_ON_GPUS in figures_page.page(tmp_path / "none")
    shown = figures_page.page(tmp_path)
    assert figures_page.NOT_ON_GPUS not in shown
    assert "## NVIDIA H200\n" in shown
    assert "| 8B: step of 1 row, 1k tokens | 4.1 | ms | 4.2 on an H200 |" in shown
    assert "- engine, fp8: RuntimeError: no" in shown


def test_faults_are_shown_with_their_outcome_and_a_row_per_kind() -> None:
    values: dict[str, float] = {"faults": 3, "requests": 90, "lost": 0, "changed": 0, "leaked": 0}
    values |= {"recovery_s.kill.p50": 1.5, "recovery_s.kill.p99": 2.25}
    figures = {f"chaos.{name}": {"value": value, "note": "3 faults"} for name, value in values.items()}
    total, _, _, _, row = figures_page.faults(figures)
    assert total == "In all: 3 faults, 90 requests, 0 lost, 0 changed, 0 leaked."
    assert row == "| kill | 3 | 1.5 | 2.25 |"


def test_cells_beside_transformers_leave_out_what_was_not_measured() -> None:
    values = {
        "a.stored": 3.0,
        "a.quire.load": 1.0,
        "a.transformers.load": 2.0,
        "b.stored": 4.0,
        "b.quire.load": 1.5,
    }
    figures = {f"loading.{name}": {"value": value} for name, value in values.items()}
    rows = figures_page.beside_transformers("weights", stored="stored", load="load")(figures)[2:]
    assert rows == ["| a | 3 | 1 / 2 |", "| b | 4 | 1.5 |"]
