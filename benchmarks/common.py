"""Figures: the one form in which every benchmark writes what it measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
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
    """Writes {"command", "date", "machine", "figures": {name: {"value", "unit", "note"}}}."""
    module = Path(sys.argv[0]).stem if __package__ is None else f"-m {__package__}.{Path(sys.argv[0]).stem}"
    record = {
        "command": shlex.join(["python", *module.split(), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "figures": {name: asdict(figure) for name, figure in figures.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with --json."""
    line = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    line.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    return line


def report(figures: dict[str, Figure], json_path: Path | None) -> None:
    """Prints the figures as a table, and writes them where asked."""
    table = Table(*(Column(name, no_wrap=name != "note") for name in ("figure", "value", "unit", "note")))
    for name, figure in figures.items():
        table.add_row(name, f"{figure.value:,.4g}", figure.unit, figure.note)
    Console().print(table)
    if json_path is not None:
        write_figures(json_path, figures)


def median(values: list[float]) -> float:
    return statistics.median(values)
