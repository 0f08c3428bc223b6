"""JSON files of benchmark figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import Figure, table_lines, write_figures


def test_figures_file_records_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "figures.json"
    monkeypatch.setattr("sys.argv", ["x", "--peers", str(tmp_path), "--json", str(out), "--model", "s"])
    for value in (1.0, 2.0):
        write_figures(out, {"offline.load_s": Figure(value, "s", "a note")})
    record = json.loads(out.read_text())
    assert set(record) == {"command", "date", "machine", "commit", "figures"}
    assert record["command"].endswith("--peers DIR --json FILE --model s")
    assert record["figures"] == {"offline.load_s": {"value": 2.0, "unit": "s", "note": "a note"}}
    assert [path.name for path in out.parent.iterdir()] == [out.name], "nothing unfinished remains"


def test_notes_stand_beside_the_figures_where_they_fit_and_below_where_they_do_not() -> None:
    figures = {"a.rate": Figure(1234.5, "tokens/s", "steady decode"), "b": Figure(0.5, "s", "steady decode")}
    wide = table_lines(figures, 80)
    assert [line.split() for line in wide] == [
        ["a.rate", "1,234", "tokens/s", "steady", "decode"],
        ["b", "0.5", "s", "steady", "decode"],
    ]
    narrow = table_lines(figures, 34)
    assert max(map(len, narrow)) <= 34
    assert narrow[2:] == ["", "[1] steady decode"]
