"""Reports of a load: tables on a terminal, JSON, and a page with charts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..charts import Series, chart, distribution, html_table, page
from ..simulate import seconds
from .measures import Measures

if TYPE_CHECKING:
    from rich.console import Console

LATENCIES = {
    "ttft_s": "first token",
    "itl_s": "between tokens",
    "e2e_s": "whole request",
    "lateness_s": "sent late by",
}
_MOST_DOTS = 2000


def rates_table(points: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: a load each."""
    header = ["load", "served/s", "good/s", "tokens/s", "p99 first", "p99 between", "errors"]
    rows = [
        [
            point["label"],
            f"{point['requests_per_s']:.2f}",
            f"{point['goodput_requests_per_s']:.2f}",
            f"{point['output_tokens_per_s']:,.0f}",
            _shown(point["ttft_s"], "p99"),
            _shown(point["itl_s"], "p99"),
            str(sum(point["errors"].values())),
        ]
        for point in points
    ]
    return header, rows


def latency_table(point: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: a latency each."""
    header = ["latency", "mean", "p50", "p90", "p99", "p99 at 95 %"]
    rows = []
    for key, name in LATENCIES.items():
        summary = point[key]
        cells = [_shown(summary, column) for column in ("mean", "p50", "p90", "p99")]
        interval = " - ".join(map(seconds, summary.get("p99_interval", ())))  # aiperf reports none
        rows.append([name, *cells, interval])
    return header, rows


def _shown(summary: Mapping[str, Any], column: str) -> str:
    return seconds(summary[column]) if summary["count"] else ""


def print_report(console: Console, points: Sequence[Mapping[str, Any]]) -> None:
    """Print the loads, and the latencies of the last one, at most 80 columns wide."""
    from rich.table import Table

    tables = [rates_table(points), latency_table(points[-1])]
    for header, rows in tables:
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for point in points:
        for kind, number in point["errors"].items():
            console.print(f"{point['label']}: {number} requests failed: {kind}")


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


def write_page(path: Path, title: str, record: Mapping[str, Any], loads: Sequence[Measures]) -> None:
    """Write one HTML file with tables of all loads, and charts of those whose outcomes are known."""
    points = record["points"]
    body = [
        f"<p>{escape(str(record['date']))}, {escape(str(record['target']))}</p>",
        html_table(*rates_table(points)),
        f"<h2>Latencies at {escape(points[-1]['label'])}</h2>",
        html_table(*latency_table(points[-1])),
        *_charts(loads),
    ]
    served = sorted(
        (point["requests_per_s"], point["ttft_s"]["p99"], point["label"])
        for point in points
        if point["ttft_s"]["count"]
    )
    if len(served) > 1:
        pairs, labels = [(rate, late) for rate, late, _ in served], [label for *_, label in served]
        series = [Series("p99 of first tokens", pairs, labels=labels)]
        body.append(chart("Latency against throughput", series, "requests per second", "seconds"))
    path.write_text(page(title, body))


def _charts(loads: Sequence[Measures]) -> list[str]:
    """Return the distributions of latencies of all loads, and the last one's over time."""
    first = [Series(each.label, distribution([one.ttft_s for one in each.served])) for each in loads]
    gaps = [
        Series(each.label, distribution([gap for one in each.served for gap in one.gaps])) for each in loads
    ]
    over_time = [
        Series(each.label, [(one.due_s, one.ttft_s) for one in _thinned(each.served)], is_line=False)
        for each in loads[-1:]
    ]
    return [
        chart("Share of requests with a first token within a time", first, "seconds", "share", log_x=True),
        chart("Share of tokens that follow within a time", gaps, "seconds", "share", log_x=True),
        chart("First tokens over time", over_time, "seconds from the start", "seconds to the first token"),
    ]


def _thinned(values: Sequence[Any]) -> Sequence[Any]:
    return values[:: max(1, len(values) // _MOST_DOTS)]
