"""Charts as inline SVG: lines and points on two axes, without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 28, 44
_COLORS = ("#1f6feb", "#d29922", "#2da44e", "#cf222e", "#8250df", "#57606a", "#bf3989", "#1b7c83")
# Points beyond are left out of a line: nobody sees them.
_MOST_POINTS = 400

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind.

    Attributes:
        is_line: they are connected; otherwise each is a dot.
        labels: a tooltip for each point; empty for none.
    """

    name: str
    points: Sequence[Point]
    is_line: bool = True
    labels: Sequence[str] = ()


def chart(title: str, series: Sequence[Series], x_label: str, y_label: str, *, log_x: bool = False) -> str:
    """Return an SVG element with the series; an empty string without a point."""
    kept = [each for each in series if each.points]
    if not kept:
        return ""
    xs = [x for each in kept for x, _ in each.points if not log_x or x > 0]
    ys = [y for each in kept for _, y in each.points]
    x_axis = _Axis(min(xs, default=1.0), max(xs, default=1.0), _LEFT, _WIDTH - _RIGHT, log_x)
    y_axis = _Axis(min(0.0, *ys), max(ys), _HEIGHT - _BOTTOM, _TOP, False)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        'font-family="sans-serif" font-size="11" fill="#24292f">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="16" font-size="13">{escape(title)}</text>',
    ]
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#eaeef2"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 28}" text-anchor="middle">{value:g}</text>')
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#eaeef2"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="14" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {_HEIGHT / 2})">'
        f"{escape(y_label)}</text>"
    )
    for number, each in enumerate(kept):
        parts += _drawn(each, x_axis, y_axis, _COLORS[number % len(_COLORS)])
        if len(kept) > 1 or each.name:
            y = _TOP + 14 + 14 * number
            color = _COLORS[number % len(_COLORS)]
            parts.append(
                f'<text x="{_WIDTH - _RIGHT - 8}" y="{y}" text-anchor="end" fill="{color}">{escape(each.name)}</text>'
            )
    return "\n".join([*parts, "</svg>"])


def distribution(values: Sequence[float]) -> list[Point]:
    """Return (value, share of the values up to it), for a chart."""
    ordered = sorted(values)
    step = max(1, len(ordered) // _MOST_POINTS)
    places = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[place], (place + 1) / len(ordered)) for place in places]


@dataclass(frozen=True, slots=True)
class _Axis:
    """The places of values between two ends, in pixels."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool

    def place(self, value: float) -> float:
        low, high, value = self._scaled(self.low), self._scaled(self.high), self._scaled(value)
        return self.begin + (self.end - self.begin) * ((value - low) / (high - low) if high > low else 0.5)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.is_log else value

    def ticks(self) -> list[float]:
        """Return a few round values between the ends."""
        if self.high <= self.low:
            return [self.low]
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers]
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]


def _drawn(series: Series, x_axis: _Axis, y_axis: _Axis, color: str) -> list[str]:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in series.points]
    parts = []
    if series.is_line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    if not series.is_line or series.labels:
        for number, (x, y) in enumerate(places):
            title = f"<title>{escape(series.labels[number])}</title>" if series.labels else ""
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}">{title}</circle>')
    return parts


def page(title: str, body: Sequence[str]) -> str:
    """Return a self-contained HTML page."""
    style = (
        "body{font-family:sans-serif;max-width:60em;margin:2em auto;color:#24292f}"
        "table{border-collapse:collapse}td,th{border:1px solid #d0d7de;padding:.3em .7em;text-align:right}"
        "td:first-child,th:first-child{text-align:left}svg{display:block;margin:1em 0;max-width:100%;height:auto}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{style}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
