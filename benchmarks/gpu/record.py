"""Record: figures and failures of one stage, written to its file after each of them."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, machine

Figures = dict[str, dict[str, Any]]


class Record:
    """The file of one stage, with its figures, its failures and its circumstances.

    Args:
        deadline: time.monotonic() at which the stage should have ended.

    Attributes:
        status: ``running``, ``done``, or what the parent process found: ``failed``, ``timed out`` or ``not run``.
    """

    def __init__(self, path: Path, stage: str, deadline: float, device: str) -> None:
        self._path = path
        self._stage, self._device = stage, device
        self._started = time.monotonic()
        self._deadline = deadline
        self.status = "running"
        self.figures: dict[str, Figure] = {}
        self.problems: list[dict[str, str]] = []
        self.notes: dict[str, Any] = {}
        self.write()

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def add(self, name: str, value: float, unit: str, note: str = "") -> None:
        """Add a figure."""
        self.figures[f"gpu.{name}"] = Figure(value, unit, note)
        self.write()

    def note(self, name: str, value: Any) -> None:
        """Add a value for the reader that is no figure, such as a list of kernels."""
        self.notes[name] = value
        self.write()

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Run the body; an exception becomes a problem with its stack trace, and the stage goes on."""
        try:
            yield
        except Exception as error:
            self._add_problem(name, f"{type(error).__name__}: {error}", traceback.format_exc())

    def has_time(self, name: str, seconds: float) -> bool:
        """Return whether a case may start that needs `seconds`; if not, it is a problem. A late stage is killed."""
        if self.seconds_left >= seconds:
            return True
        self._add_problem(name, f"not run: needs {seconds:.0f} s, {self.seconds_left:.0f} s are left", "")
        return False

    def _add_problem(self, name: str, error: str, trace: str) -> None:
        self.problems.append({"case": name, "error": error, "trace": trace})
        print(f"{self._stage}: {name}: {error}", flush=True)
        self.write()

    def write(self) -> None:
        record = {
            "stage": self._stage,
            "status": self.status,
            "seconds": round(time.monotonic() - self._started, 1),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "device": self._device,
            "figures": {name: asdict(figure) for name, figure in self.figures.items()},
            "problems": self.problems,
            "notes": self.notes,
        }
        write_json(self._path, record)


def write_json(path: Path, value: Any) -> None:
    """Write a file atomically."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(value, indent=1) + "\n")
    unfinished.replace(path)


def read_figure(folder: Path, stage: str, name: str) -> float | None:
    """Return a figure of an earlier stage. Returns None if there is none."""
    path = folder / f"{stage}.json"
    if not path.exists():
        return None
    figure = json.loads(path.read_text())["figures"].get(f"gpu.{name}")
    return None if figure is None else float(figure["value"])
