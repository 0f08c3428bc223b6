"""docs/benchmarks.md is generated from the result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import figure_tables, figures_page
from benchmarks.figure_plots import Plot
from benchmarks.figure_sections import SECTIONS


def test_page_names_every_result_file() -> None:
    shown = {name for section in SECTIONS for name in section.files}
    assert shown >= {path.stem for path in figures_page.RESULTS.glob("*.json")}


def test_plot_has_the_figures_of_its_series() -> None:
    plot = Plot("p", "Title", "ranks", "tokens/s", {"a": "x.*.a", "b": "x.*.b"})
    figures = {
        "x.1.a": {"value": 5.0},
        "x.2.a": {"value": 7.5},
        "x.2.b": {"value": 9.0},
        "y.4.a": {"value": 1.0},
    }
    drawn = plot.draw(figures)
    assert drawn.count("<circle") == 3
    assert "<title>2: 7.5</title>" in drawn
    with pytest.raises(KeyError):
        plot.draw({"x.1.a": {"value": 5.0}})


def test_engine_that_did_not_finish_is_shown_with_its_time() -> None:
    figures = {
        "peers.quire.w1.output_tokens_per_s": {"value": 5.0, "unit": "tokens/s", "note": ""},
        "peers.other.w1.failed_after_s": {"value": 80.1, "unit": "s", "note": ""},
    }
    table = figure_tables.engines({"60M": figures})
    assert table[-2:] == [
        "| 60M | quire | 5 |  |  |  |  |",
        "| 60M | other | not finished in 80 s |  |  |  |  |",
    ]


def test_server_that_did_not_start_has_no_cells() -> None:
    figures = {
        "image_servers.quire.first_token_ms.cold": {"value": 5.0},
        "image_servers.vllm.failed_after_s": {"value": 80.1},
    }
    table = figure_tables.servers(first_token_ms__cold="new image")(figures)
    assert table[-2:] == ["| quire | 5 |", "| vllm |  |"]


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


def test_accuracy_has_a_row_per_workload_and_number_of_ranks() -> None:
    names = "output_tokens_per_s", "ttft.p50", "ttft.p99", "itl.p50", "itl.p99"
    figures = {f"simulation.{{}}chat.{name}": {"value": 0.01 * n} for n, name in enumerate(names)}
    settings = {
        label: {name.format(prefix): figure for name, figure in figures.items()}
        for label, prefix in (("1", ""), ("2", "tp2."))
    }
    assert figure_tables.accuracy(settings)[-2:] == [
        "| 1 | chat | +0% | +1% | +2% | +3% | +4% |",
        "| 2 | chat | +0% | +1% | +2% | +3% | +4% |",
    ]
