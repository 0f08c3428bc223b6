"""Shared form of all benchmarks: the command line, the figures, and the table and JSON that report them."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.cluster.os_utils.measurement import write_measurement


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        unit: for example ``us``, ``bytes``, ``tokens/s``.
        note: conditions of the measurement that the name does not state.
    """

    value: float
    unit: str
    note: str = ""


def write_figures(path: Path, figures: dict[str, Figure]) -> None:
    """Write the figures as JSON; see write_measurement."""
    command = shlex.join(["python", *_program(), *map(_portable, sys.argv[1:])])
    write_measurement(path, command, {name: asdict(figure) for name, figure in figures.items()})


def _program() -> list[str]:
    """Return the arguments of `python` that run this program again."""
    spec = sys.modules["__main__"].__spec__
    return [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]


def _portable(argument: str) -> str:
    """Return the argument, or a placeholder for an absolute path, which means nothing on other machines."""
    if not argument.startswith("/"):
        return argument
    return "DIR" if Path(argument).is_dir() else "FILE"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser that has --json."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser


def image_path(path: str) -> Path:
    """Convert an argument that names an image to draw.

    Raises:
        argparse.ArgumentTypeError: matplotlib is missing; checked here, before the benchmark runs for minutes.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "needs matplotlib, which is in the extra 'bench': pip install -e '.[bench]'"
        )
    return Path(path)


def names_from(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argument type: a comma-separated list of names, each of which must be known."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}"
            )
        return found

    return names


def report(figures: dict[str, Figure], json_path: Path | None) -> None:
    """Print the figures as a table and, given a path, write them as JSON."""
    # benchmarks.gpu runs on machines that may lack it.
    from rich.console import Console

    for line in table_lines(figures, Console().width):
        print(line)
    if json_path is not None:
        write_figures(json_path, figures)


def table_lines(figures: dict[str, Figure], width: int) -> list[str]:
    """Return a table of the figures, each in one line. Notes that make a line longer than `width` stand below it."""
    values = {name: f"{figure.value:,.4g}" for name, figure in figures.items()}
    columns = [[*figures], [*values.values()], [figure.unit for figure in figures.values()]]
    of_name, of_value, of_unit = (max(map(len, column), default=0) for column in columns)
    rows = [
        f"{name:{of_name}}  {values[name]:>{of_value}} {figure.unit:{of_unit}}"
        for name, figure in figures.items()
    ]
    notes = [figure.note for figure in figures.values()]
    if all(len(f"{row}  {note}") <= width for row, note in zip(rows, notes, strict=True)):
        return [f"{row}  {note}".rstrip() for row, note in zip(rows, notes, strict=True)]
    numbers = {note: number for number, note in enumerate(dict.fromkeys(filter(None, notes)), 1)}
    marked = [
        f"{row}  [{numbers[note]}]" if note else row.rstrip() for row, note in zip(rows, notes, strict=True)
    ]
    below = [
        line
        for note, number in numbers.items()
        for line in textwrap.wrap(f"[{number}] {note}", max(width, 20), subsequent_indent="    ")
    ]
    return [*marked, "", *below]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
