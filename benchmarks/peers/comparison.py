"""Several engines in turn on one machine: who is not measured is stopped, and nobody keeps the others waiting."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from benchmarks.common import Figure
from benchmarks.peers.engine import Requests
from benchmarks.peers.process import Engine, EngineFailed, EngineTooSlow
from benchmarks.workloads import Walls, Workload, warm_up

Start = Callable[[str, float], Engine]  # a name and the seconds that loading may take


@dataclass(frozen=True, slots=True)
class Limits:
    """What time there is.

    Attributes:
        load_s: for one engine to load.
        workload_s: for one engine and one workload, all its repetitions together.
        total_s: for everything but the engines' end.
    """

    load_s: float
    workload_s: float
    total_s: float


@dataclass(slots=True)
class _Part:
    """What one engine does of a workload.

    Attributes:
        walls: of whole repetitions.
        spent_s: on those, and on one that was not finished.
        failure: why there are no more of them; empty where there is no reason.
    """

    walls: Walls = field(default_factory=list)
    spent_s: float = 0.0
    failure: str = ""

    def figures(self, workload: Workload, wanted: int) -> dict[str, Figure]:
        if not self.walls:
            return {"failed_after_s": Figure(self.spent_s, "s", self.failure)}
        note = f"{len(self.walls)} of {wanted} repetitions: {self.failure}" if self.failure else ""
        return {name: replace(figure, note=note) for name, figure in workload.figures(self.walls).items()}


class _TimeIsUp(EngineFailed):
    pass


class Comparison:
    """Engines that take turns: what disturbs the machine disturbs all of them. Use it as a context manager.

    An engine that fails or is too slow is ended, and started again for the next workload. One that does not load is
    left out. Figures are named `<engine>.<workload>.<figure>`; the note of `failed_after_s` says what went wrong.
    """

    def __init__(self, names: Sequence[str], start: Start, limits: Limits) -> None:
        self._start, self._limits = start, limits
        self._ends = time.monotonic() + limits.total_s
        self._missing = list(names)  # those to start
        self._running: dict[str, Engine] = {}

    def __enter__(self) -> Comparison:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self._running.values():
            engine.let_go()
        for engine in self._running.values():
            engine.close()

    def load(self) -> dict[str, Figure]:
        """Starts the engines that do not run, one after the other."""
        figures = {}
        missing, self._missing = self._missing, []
        for name in missing:
            started = time.monotonic()
            try:
                figures[f"{_dotless(name)}.load_s"] = Figure(self._load(name), "s")
            except EngineFailed as error:
                spent_s, reason = time.monotonic() - started, f"{name} {error}"
                figures[f"{_dotless(name)}.load.failed_after_s"] = Figure(spent_s, "s", reason)
                _say(reason)
        return figures

    def measure(self, workload_name: str, workload: Workload, repetitions: int) -> dict[str, Figure]:
        """The figures of all engines, which are started where necessary."""
        figures = self.load()
        parts = {name: _Part() for name in self._running}
        wanted = workload.num_repetitions(repetitions)
        for repetition in range(wanted):
            for name, part in parts.items():
                if not part.failure:
                    self._take_turn(name, part, workload_name, workload.batches(repetition))
                    outcome = part.failure or f"{sum(part.walls[-1]):.2f} s"
                    _say(f"{workload_name}, {repetition + 1} of {wanted}, {name}: {outcome}")
        for name, part in parts.items():
            found = part.figures(workload, wanted)
            figures |= {f"{_dotless(name)}.{workload_name}.{key}": figure for key, figure in found.items()}
        return figures

    def _load(self, name: str) -> float:
        """What loading took; the engine is warm and paused then. Raises EngineFailed."""
        engine = self._start(name, self._within(self._limits.load_s))
        try:
            engine.seconds(warm_up(), self._within(self._limits.workload_s))
        except BaseException:
            engine.kill()
            raise
        engine.pause()
        self._running[name] = engine
        return engine.load_s

    def _take_turn(self, name: str, part: _Part, workload_name: str, batches: list[Requests]) -> None:
        """One repetition more, if there is time."""
        engine, limit_s = self._running[name], self._limits.workload_s
        if part.walls and part.spent_s + max(map(sum, part.walls)) > limit_s:
            part.failure = f"{limit_s:.0f} s are too short for another"
            return
        wall: list[float] = []
        started = time.monotonic()
        try:
            engine.resume()
            for batch in batches:
                left_s = limit_s - part.spent_s - (time.monotonic() - started)
                wall.append(engine.seconds(batch, self._within(left_s)))
            engine.pause()
            part.walls.append(wall)
        except EngineFailed as error:
            spent_s = part.spent_s + time.monotonic() - started
            too_slow = isinstance(error, EngineTooSlow)
            part.failure = f"did not finish {workload_name} in {spent_s:.0f} s" if too_slow else str(error)
            self._running.pop(name).kill()
            self._missing.append(name)
        part.spent_s += time.monotonic() - started

    def _within(self, limit_s: float) -> float:
        """As much of the limit as the whole comparison has left. Raises _TimeIsUp where that is nothing."""
        left_s = self._ends - time.monotonic()
        if left_s <= 0:
            raise _TimeIsUp(f"had no turn more: {self._limits.total_s / 60:g} minutes were over")
        return max(0.0, min(limit_s, left_s))


def _dotless(name: str) -> str:
    return name.replace(".", "_")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
