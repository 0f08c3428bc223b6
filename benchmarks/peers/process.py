"""An engine in a process of its own, and several of them in turn: while one is measured the others are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from benchmarks.peers.engine import Requests
from benchmarks.peers.install import ENVIRONMENTS, python_of

FOLDER = Path(__file__).parent
MODULES = {
    "quire": "quire_engine.py",
    "vllm": "vllm_engine.py",
    "transformers": "transformers_engine.py",
    "llama.cpp": "llama_cpp_engine.py",
    "ctranslate2": "ctranslate2_engine.py",
}
# Engines that share a model among processes.
TENSOR_PARALLEL = ("quire", "vllm")
LOAD_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 3600.0
END_TIMEOUT_S = 30.0


class EngineFailed(Exception):
    """An engine ended or did not answer; names it."""


class Engine:
    """One engine with a model.

    Attributes:
        load_s: what loading took.

    Raises:
        EngineFailed: from the constructor and `seconds`; what it said itself is in its log.
    """

    def __init__(self, name: str, python: Path, options: list[str], log: Path) -> None:
        self.name, self._log = name, log
        command = [str(python), str(FOLDER / MODULES[name]), *options]
        with log.open("w") as errors:
            # A session of its own: all of its processes are stopped and ended together.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._answers: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()
        try:
            self.load_s: float = self._next(LOAD_TIMEOUT_S)["load_s"]
        except EngineFailed:
            self.close()
            raise

    def seconds(self, requests: Requests) -> float:
        """What it takes to answer all of them, at once."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"{self.name} has ended; see {self._log}") from error
        taken: float = self._next(ANSWER_TIMEOUT_S)["seconds"]
        return taken

    def pause(self) -> None:
        """Stops all of its processes: some engines use the processor while they wait."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends all of its processes. Safe to call twice."""
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except Empty:
            raise EngineFailed(f"{self.name} gave no answer in {timeout_s:g} s; see {self._log}") from None
        if not line:
            raise EngineFailed(f"{self.name} has ended; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextmanager
def engines(
    names: list[str], environments: Path, options: list[str], logs: Path
) -> Iterator[tuple[list[Engine], dict[str, str]]]:
    """Starts engines one after the other and pauses them.

    Args:
        environments: as benchmarks.peers.install made them; quire runs in the present one.
        options: of every engine; see engine.parse_arguments.

    Yields:
        Those that started, and for the others why not.
    """
    started: list[Engine] = []
    failures: dict[str, str] = {}
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for name in names:
            python = python_of(environments, name) if name in ENVIRONMENTS else Path(sys.executable)
            if not python.exists():
                failures[name] = f"is not installed in {environments}"
                continue
            try:
                engine = Engine(name, python, options, logs / f"{name}.log")
            except EngineFailed as error:
                failures[name] = str(error)
                continue
            stack.callback(engine.close)
            engine.pause()
            started.append(engine)
        yield started, failures
