"""Figures: the one form in which every benchmark writes what it measured."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        unit: for example ``us``, ``bytes``, ``tokens/s``.
        note: what it was measured on, where the name does not say.
    """

    value: float
    unit: str
    note: str = ""


def machine() -> str:
    """The processor, cores and Python of this machine, in one line."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def write_figures(path: Path, figures: dict[str, Figure]) -> None:
    """Writes {"command", "date", "machine", "figures": {name: {"value", "unit", "note"}}}, all of it or nothing."""
    record = {
        "command": shlex.join(["python", *_program(), *map(_portable, sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "figures": {name: asdict(figure) for name, figure in figures.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(path)


def _program() -> list[str]:
    """What python was asked to run; of a package, `python -m` runs its __main__."""
    spec = sys.modules["__main__"].__spec__
    return [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]


def _portable(argument: str) -> str:
    """An absolute path says nothing on other machines."""
    if not argument.startswith("/"):
        return argument
    return "DIR" if Path(argument).is_dir() else "FILE"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with --json."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    return parser


def image_path(path: str) -> Path:
    """The type of arguments that name a picture to draw: refused at once, not after minutes, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "needs matplotlib, which is in the extra 'bench': pip install -e '.[bench]'"
        )
    return Path(path)


def names_from(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of arguments that name some of those that are known, between commas."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return found

    return names


def report(figures: dict[str, Figure], json_path: Path | None) -> None:
    """Prints the figures as a table, and writes them where asked."""
    table = Table(*(Column(name, no_wrap=name != "note") for name in ("figure", "value", "unit", "note")))
    for name, figure in figures.items():
        table.add_row(name, f"{figure.value:,.4g}", figure.unit, figure.note)
    Console().print(table)
    if json_path is not None:
        write_figures(json_path, figures)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
