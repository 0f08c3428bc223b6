"""Plots of docs/benchmarks.md: charts of a result file's figures, without a library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.figure_tables import Figures
from quire.cluster.cli.charts import Point, Series, chart


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart, drawn to docs/images/bench_<name>.svg.

    Attributes:
        series: label |-> names of figures with an asterisk, which stands for the number on the x axis.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, str]
    log_x: bool = False

    @property
    def file_name(self) -> str:
        return f"bench_{self.name}.svg"

    def draw(self, figures: Figures) -> str:
        """Return the chart as SVG. Raises KeyError if no figure has a name of a series."""
        drawn = []
        for label, names in self.series.items():
            points = _points(names, figures)
            labels = [f"{x:g}: {y:.4g}" for x, y in points]
            drawn.append(Series(label, points, labels=labels))
        return chart(self.title, drawn, self.x_label, self.y_label, log_x=self.log_x) + "\n"


def _points(names: str, figures: Figures) -> list[Point]:
    pattern = re.compile(re.escape(names).replace(r"\*", r"(\d+)"))
    found = [(pattern.fullmatch(name), figure["value"]) for name, figure in figures.items()]
    points = sorted((float(match[1]), float(value)) for match, value in found if match is not None)
    if not points:
        raise KeyError(names)
    return points
