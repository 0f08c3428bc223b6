"""Live view of the streams, side by side on a terminal; otherwise one after the other at the end."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

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
