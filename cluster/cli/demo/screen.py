"""The demo on a terminal: the streams side by side, or one after the other at the end, and the figures."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...client.wire.status import ReplicaInfo
from ...os_utils.measurement import write_measurement
from .streams import Stream, Streams

_REFRESHES_PER_S = 12
_MIN_PANEL_WIDTH, _MIN_PANEL_HEIGHT = 36, 4
_MAX_COLUMNS = 4
_BORDER_WIDTH, _BORDER_LINES = 4, 2
_MARGIN_LINES = 1


def follow(console: Console, streams: Streams, timeout_s: float) -> bool:
    """Show the streams until all have ended; return False if the timeout passes first."""
    if not console.is_terminal:
        in_time = streams.wait(timeout_s)
        for stream in streams.streams:
            console.print(_title(stream), _whole_text(stream), sep="\n", end="\n\n", soft_wrap=True)
        return in_time
    with Live(
        get_renderable=lambda: _grid(console, streams.streams),
        console=console,
        refresh_per_second=_REFRESHES_PER_S,
        vertical_overflow="crop",
    ):
        return streams.wait(timeout_s)


def _grid(console: Console, streams: list[Stream]) -> Table:
    """Lay out one panel per stream in as many columns as fit; each panel shows the end of its text."""
    num_columns = max(1, min(_MAX_COLUMNS, console.width // _MIN_PANEL_WIDTH))
    num_rows = -(-len(streams) // num_columns)
    height = max(_MIN_PANEL_HEIGHT, (console.height - _MARGIN_LINES) // num_rows)
    width = console.width // num_columns
    grid = Table.grid()
    for start in range(0, len(streams), num_columns):
        grid.add_row(
            *(_panel(console, stream, width, height) for stream in streams[start : start + num_columns])
        )
    return grid


def _panel(console: Console, stream: Stream, width: int, height: int) -> Panel:
    text = Text.assemble((stream.request.prompt, "dim"), stream.text)
    lines = text.wrap(console, width - _BORDER_WIDTH)[-(height - _BORDER_LINES) :]
    color = "red" if stream.error else "green" if stream.finished else "blue"
    content = Text("\n").join(lines)
    return Panel(
        content, title=_title(stream), title_align="left", border_style=color, width=width, height=height
    )


def _title(stream: Stream) -> Text:
    title = Text(stream.request.title, "bold")
    if stream.finished is not None:
        title.append(f" · {stream.num_tokens} tokens, ended by {stream.finished.finish_reason}", "default")
    return title


def _whole_text(stream: Stream) -> Text:
    if stream.error is not None:
        return Text(f"failed: {stream.error}", "red")
    return Text.assemble((stream.request.prompt, "dim"), stream.text)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; `label` is shown in the table only."""

    label: str
    value: float
    unit: str
    note: str = ""


def measure(streams: Streams, replica: ReplicaInfo, ready_s: float) -> dict[str, Figure]:
    """Return the figures, name |-> figure.

    Args:
        replica: the replica's state after every request has ended.
        ready_s: seconds from the server's start until it was ready.
    """
    kv = replica.kv
    num_tokens = sum(stream.num_tokens for stream in streams.streams)
    first_s = [stream.first_token_s for stream in streams.streams if stream.first_token_s is not None]
    gaps_s = [gap_s for stream in streams.streams for gap_s in stream.gaps_s]
    of_blocks = f"of {kv.num_blocks} blocks of {kv.block_size} tokens"
    return {
        "demo.ready": Figure("time to ready", ready_s, "s"),
        "demo.requests": Figure(
            "requests answered", sum(s.finished is not None for s in streams.streams), ""
        ),
        "demo.output_tokens": Figure("output tokens", num_tokens, "tokens"),
        "demo.throughput": Figure(
            "throughput", num_tokens / streams.wall_s, "tokens/s", "all requests at once"
        ),
        "demo.ttft.p50": Figure("time to first token, p50", _percentile(first_s, 50) * 1e3, "ms"),
        "demo.ttft.p99": Figure("time to first token, p99", _percentile(first_s, 99) * 1e3, "ms"),
        "demo.itl.p50": Figure("inter-token latency, p50", _percentile(gaps_s, 50) * 1e3, "ms"),
        "demo.itl.p99": Figure("inter-token latency, p99", _percentile(gaps_s, 99) * 1e3, "ms"),
        "demo.steps": Figure("steps", replica.num_steps, "steps"),
        "demo.kv.peak_blocks": Figure("KV blocks used at peak", kv.peak_used_blocks, "blocks", of_blocks),
        "demo.kv.waste": Figure(
            "KV memory wasted", kv.mean_kv_fragmentation * 100, "%", "of allocated slots, mean of all steps"
        ),
        "demo.prefix.hit_rate": Figure(
            "prefix-cache hits",
            kv.prefix_hit_rate * 100,
            "%",
            f"{kv.prefix_hit_tokens} of {kv.prefix_query_tokens} prompt tokens",
        ),
    }


def table(figures: dict[str, Figure]) -> Table:
    rows = Table("figure", "value", "", title="The main job", title_justify="left", title_style="bold")
    rows.columns[1].justify = "right"
    for figure in figures.values():
        is_count = float(figure.value).is_integer()
        value = f"{figure.value:,.0f}" if is_count else f"{figure.value:,.1f}"
        rows.add_row(figure.label, f"{value} {figure.unit}".strip(), figure.note)
    return rows


def write(path: Path, command: str, figures: dict[str, Figure]) -> None:
    """Write the figures as JSON; see write_measurement."""
    plain = {name: asdict(figure) for name, figure in figures.items()}
    for figure in plain.values():
        del figure["label"]
    write_measurement(path, command, plain)


def _percentile(values: list[float], percent: int) -> float:
    """Return a percentile of the values, NaN if there are none."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
