"""Files of the work and time of each step that a replica ran, to which `quire calibrate` fits the time of a step."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from ...proto.config import EngineConfig
from ...proto.errors import ConfigError
from .step_meter import MeasuredStep, MeteredRanks, StepWork
from .worker_group import WorkerGroup

# About 60 MB: hours of a busy replica.
MAX_STEPS = 1_000_000
_KIND = "steps"
_WORK = [each.name for each in fields(StepWork)]

_log = logging.getLogger(__name__)


class StepRecord:
    """Appends steps to a file, which it closes, until it has MAX_STEPS, or its disk takes no more.

    Args:
        served: what the steps depend on; see `served_as`.
    """

    def __init__(self, file: TextIO, served: dict[str, Any]) -> None:
        self._name = file.name
        self._file: TextIO | None = file
        self._began_at = time.time()
        self._num_steps = 0
        self._write(
            {"kind": _KIND, "began_at": self._began_at, "columns": ["at_s", "seconds", *_WORK], **served}
        )

    def add(self, work: StepWork, seconds: float) -> None:
        if not work.num_tokens or self._file is None:
            return
        self._num_steps += 1
        at_s = round(time.time() - self._began_at, 3)
        self._write([at_s, round(seconds, 7), *asdict(work).values()])
        if self._num_steps == MAX_STEPS:
            _log.warning("%s has %d steps; no more are recorded", self._name, MAX_STEPS)
            self.close()

    def _write(self, row: object) -> None:
        assert self._file is not None
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            _log.warning("%s: no more steps are recorded: %s", self._name, error.strerror)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # lines that a full disk does not take
                file.close()


@contextmanager
def recorded_ranks(ranks: WorkerGroup, config: EngineConfig, replica_id: str) -> Iterator[WorkerGroup]:
    """Yield the ranks, with their steps recorded in a new file if the configuration names a directory for it.

    Raises:
        ConfigError: the file cannot be made.
    """
    folder = config.scheduler.record_steps
    if folder is None:
        yield ranks
        return
    name = "".join(each if each.isalnum() or each in "-_." else "-" for each in replica_id)
    path = Path(folder) / f"{name}-{time.time_ns() // 1_000_000}.jsonl"
    try:
        file = path.open("x")
    except OSError as error:
        raise ConfigError(f"record_steps: {path} cannot be made: {error.strerror}") from error
    record, limits = StepRecord(file, served_as(config)), config.scheduler
    try:
        yield MeteredRanks(
            ranks,
            limits.max_num_seqs,
            time.perf_counter,
            record.add,
            is_serial=limits.max_steps_in_flight == 1,
        )
    finally:
        record.close()


def served_as(config: EngineConfig) -> dict[str, Any]:
    """Return what of a configuration the time of equal steps depends on."""
    return {
        "model": config.model.name,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
    }


def read_steps(path: Path) -> tuple[dict[str, Any], list[MeasuredStep]]:
    """Return the header of a file of steps, and its steps, without a last line that is not whole.

    Raises:
        ConfigError: the file cannot be read, or is none of steps.
    """
    try:
        header, *rows = path.read_text().rpartition("\n")[0].splitlines()
        facts = json.loads(header)
        if not isinstance(facts, dict) or facts.get("kind") != _KIND:
            raise ValueError("it does not begin with the facts of recorded steps")
        return facts, [_read_step(row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"steps {path} cannot be read: {error}") from error


def _read_step(row: str) -> MeasuredStep:
    _, seconds, *work = json.loads(row)
    return MeasuredStep(StepWork(*map(int, work)), float(seconds))
