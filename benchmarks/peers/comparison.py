"""Comparison of engines that take turns on one machine; all but the measured one are stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from benchmarks.common import Figure
from benchmarks.peers.engine import Requests
from benchmarks.peers.process import Engine, EngineFailed, EngineTooSlow
from benchmarks.workloads import Walls, Workload

Start = Callable[[str, float], Engine]  # (name, time limit for loading in seconds) |-> engine


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits.

    Attributes:
        load_s: for loading one engine.
        workload_s: for all repetitions of one workload on one engine.
        total_s: for the whole comparison, except closing the engines.
    """

    load_s: float
    workload_s: float
    total_s: float


@dataclass(slots=True)
class _EngineRun:
    """Progress of one engine on one workload.

    Attributes:
        walls: wall times of finished repetitions.
        spent_s: total time, including an unfinished repetition.
        failure: the reason why no further repetition runs; empty while there is none.
    """

    walls: Walls = field(default_factory=list)
    spent_s: float = 0.0
    failure: str = ""

    def figures(self, workload: Workload, wanted: int) -> dict[str, Figure]:
        if not self.walls:
            return {"failed_after_s": Figure(self.spent_s, "s", self.failure)}
        note = f"{len(self.walls)} of {wanted} repetitions: {self.failure}" if self.failure else ""
        return {name: replace(figure, note=note) for name, figure in workload.figures(self.walls).items()}


class _OutOfTime(EngineFailed):
    pass


class Comparison:
    """Engines that take turns, so that a disturbance of the machine affects all of them. A context manager.

    An engine that fails or is too slow is killed and restarted for the next workload. An engine that does not load is
    left out. Figures are named `<engine>.<workload>.<figure>`; the note of `failed_after_s` gives the reason.

    Args:
        warm_up: requests that each engine computes, untimed, before each of its turns.
    """

    def __init__(self, names: Sequence[str], start: Start, limits: Limits, warm_up: Requests) -> None:
        self._start, self._limits, self._warm_up = start, limits, warm_up
        self._ends = time.monotonic() + limits.total_s
        self._missing = list(names)  # engines to start
        self._running: dict[str, Engine] = {}

    def __enter__(self) -> Comparison:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._running.values():
            engine.begin_close()
        for engine in self._running.values():
            engine.close()

    def load(self) -> dict[str, Figure]:
        """Start the engines that are not running, one after the other; return their load times."""
        figures = {}
        missing, self._missing = self._missing, []
        for name in missing:
            started = time.monotonic()
            try:
                figures[f"{_dotless(name)}.load_s"] = Figure(self._load(name), "s")
            except EngineFailed as error:
                spent_s, reason = time.monotonic() - started, f"{name} {error}"
                figures[f"{_dotless(name)}.load.failed_after_s"] = Figure(spent_s, "s", reason)
                _print_progress(reason)
        return figures

    def measure(self, workload_name: str, workload: Workload, repetitions: int) -> dict[str, Figure]:
        """Start the missing engines, run one workload on all of them and return its figures."""
        figures = self.load()
        runs = {name: _EngineRun() for name in self._running}
        wanted = workload.num_repetitions(repetitions)
        for repetition in range(wanted):
            for name, run in runs.items():
                if not run.failure:
                    self._repeat(name, run, workload_name, workload.batches(repetition))
                    outcome = run.failure or f"{sum(run.walls[-1]):.2f} s"
                    _print_progress(f"{workload_name}, {repetition + 1} of {wanted}, {name}: {outcome}")
        for name, run in runs.items():
            found = run.figures(workload, wanted)
            figures |= {f"{_dotless(name)}.{workload_name}.{key}": figure for key, figure in found.items()}
        return figures

    def _load(self, name: str) -> float:
        """Start an engine, warm it up, pause it, and return its load time. Raises EngineFailed."""
        engine = self._start(name, self._within(self._limits.load_s))
        try:
            engine.seconds(self._warm_up, self._within(self._limits.workload_s))
        except BaseException:
            engine.kill()
            raise
        engine.pause()
        self._running[name] = engine
        return engine.load_s

    def _repeat(self, name: str, run: _EngineRun, workload_name: str, batches: list[Requests]) -> None:
        """Run one more repetition after an untimed warm-up, if there is time."""
        engine, limit_s = self._running[name], self._limits.workload_s
        if run.walls and run.spent_s + max(map(sum, run.walls)) > limit_s:
            run.failure = f"{limit_s:.0f} s are too short for another"
            return
        wall: list[float] = []
        started = time.monotonic()
        try:
            engine.resume()
            engine.seconds(
                self._warm_up, self._within(limit_s)
            )  # the others have used the processor's caches
            for batch in batches:
                left_s = limit_s - run.spent_s - (time.monotonic() - started)
                wall.append(engine.seconds(batch, self._within(left_s)))
            engine.pause()
            run.walls.append(wall)
        except EngineFailed as error:
            spent_s = run.spent_s + time.monotonic() - started
            too_slow = isinstance(error, EngineTooSlow)
            run.failure = f"did not finish {workload_name} in {spent_s:.0f} s" if too_slow else str(error)
            self._running.pop(name).kill()
            self._missing.append(name)
        run.spent_s += time.monotonic() - started

    def _within(self, limit_s: float) -> float:
        """Return the limit, shortened to the time left for the whole comparison. Raises _OutOfTime if none is."""
        left_s = self._ends - time.monotonic()
        if left_s <= 0:
            raise _OutOfTime(f"did not run: the limit of {self._limits.total_s / 60:g} minutes had passed")
        return max(0.0, min(limit_s, left_s))


def _dotless(name: str) -> str:
    return name.replace(".", "_")


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
