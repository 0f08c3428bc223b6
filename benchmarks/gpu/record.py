"""Record: figures and failures of one stage, written to the run's one file after each of them."""

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

from benchmarks.common import Figure
from quire.cluster.os_utils.measurement import machine

RESULT = "result.json"


class DeviceLost(BaseException):
    """The process can use its GPU no more; the stage goes on in another one."""


class Record:
    """The part of one stage in the file: its figures, its failures and its circumstances.

    Args:
        folder: of the file.
        deadline: time.monotonic() at which the stage should have ended.
        resumes: another process began the stage; the cases that it began are not run again.
    """

    def __init__(
        self, folder: Path, stage: str, deadline: float, device: str, *, resumes: bool = False
    ) -> None:
        self._folder = folder
        self._deadline = deadline
        found = read_stage(folder, stage) if resumes else {}
        self._begun: list[str] = found.get("begun", [])
        self._begun_before = frozenset(self._begun)
        self._started = time.monotonic() - found.get("seconds", 0.0)
        self.figures = {name: Figure(**figure) for name, figure in found.get("figures", {}).items()}
        self.problems: list[dict[str, str]] = found.get("problems", [])
        self.notes: dict[str, Any] = found.get("notes", {})
        self._circumstances = {
            "stage": stage,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "device": device,
        }
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
        """Run the body; an exception becomes a problem with its stack trace, and the stage goes on.

        Raises:
            DeviceLost: after the exception, this process can use its GPU no more.
        """
        # Here, because `quire` can be imported in the processes of stages only.
        from quire.worker.rank.lost_device import loses_device

        try:
            yield
        except Exception as error:
            self._add_problem(name, f"{type(error).__name__}: {error}", traceback.format_exc())
            if loses_device(str(error)):
                raise DeviceLost from error

    def begins(self, name: str, seconds: float = 0.0) -> bool:
        """Return whether a case is to be run: another process of the stage did not begin it, and time is left.

        Too little time is a problem, since a late stage is killed.

        Args:
            seconds: that the case needs.
        """
        if name in self._begun_before:
            return False
        if self.seconds_left < seconds:
            self._add_problem(name, f"not run: needs {seconds:.0f} s, {self.seconds_left:.0f} s are left", "")
            return False
        self._begun.append(name)
        self.write()
        return True

    def _add_problem(self, name: str, error: str, trace: str) -> None:
        self.problems.append({"case": name, "error": error, "trace": trace})
        print(f"{self._circumstances['stage']}: {name}: {error}", flush=True)
        self.write()

    def write(self, status: str = "running") -> None:
        """Write the file. The status is ``done`` at the end of the stage; the parent process finds others."""
        record = self._circumstances | {
            "status": status,
            "seconds": round(time.monotonic() - self._started, 1),
            "figures": {name: asdict(figure) for name, figure in self.figures.items()},
            "problems": self.problems,
            "notes": self.notes,
            "begun": self._begun,
        }
        write_stage(self._folder, record)


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all stages of a run, in their order; none without a file."""
    path = folder / RESULT
    return json.loads(path.read_text()) if path.exists() else []


def read_stage(folder: Path, stage: str) -> dict[str, Any]:
    """Return the record of a stage, empty if there is none."""
    return next((record for record in read_results(folder) if record["stage"] == stage), {})


def write_stage(folder: Path, record: dict[str, Any]) -> None:
    """Add or replace the record of a stage. The file is complete at any time, whatever ends the process."""
    records = {each["stage"]: each for each in read_results(folder)} | {record["stage"]: record}
    unfinished = folder / f".{RESULT}.{os.getpid()}"
    with unfinished.open("w") as file:
        json.dump(list(records.values()), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / RESULT)


def read_figure(folder: Path, stage: str, name: str) -> float | None:
    """Return a figure of an earlier stage. Returns None if there is none."""
    figure = read_stage(folder, stage).get("figures", {}).get(f"gpu.{name}")
    return None if figure is None else float(figure["value"])
