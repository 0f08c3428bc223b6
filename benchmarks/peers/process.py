"""An engine in processes of its own, driven from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import psutil

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
# More than the keeper gives the engine.
CLOSE_TIMEOUT_S = 60.0


class EngineFailed(Exception):
    """An engine did not start, has ended or did not answer; says so of "it"."""


class EngineTooSlow(EngineFailed):
    """There was no answer in time."""


class Engine:
    """One engine with a model. However this process ends, the engine's processes end with it (see keeper).

    Args:
        environments: as benchmarks.peers.install made them; quire runs in the present one.
        options: see engine.parse_arguments.
        log: what it says itself is added there.
        load_timeout_s: how long it may take to load.

    Attributes:
        load_s: what loading took.

    Raises:
        EngineFailed: it did not start.
    """

    def __init__(
        self, name: str, environments: Path, options: list[str], log: Path, load_timeout_s: float
    ) -> None:
        python = python_of(environments, name) if name in ENVIRONMENTS else Path(sys.executable)
        if not python.exists():
            raise EngineFailed("is not installed")
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        pipe, self._hold = os.pipe()
        with log.open("a") as errors:
            self._keeper = subprocess.Popen(
                [sys.executable, str(FOLDER / "keeper.py"), str(pipe), python, FOLDER / MODULES[name], *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                pass_fds=[pipe],
                start_new_session=True,  # a Ctrl-C is for this process alone
            )  # fmt: skip
        os.close(pipe)
        self._answers: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()
        try:
            self.load_s: float = self._next(load_timeout_s)["load_s"]
        except BaseException:
            self.kill()
            raise

    def seconds(self, requests: Requests, timeout_s: float) -> float:
        """What it takes to answer all of them, at once.

        Raises:
            EngineTooSlow: it computes still; only `kill` makes sense then.
            EngineFailed: it has ended.
        """
        # Not here: an engine that does not read must not keep this thread waiting.
        Thread(target=self._ask, args=(json.dumps(requests),), daemon=True).start()
        taken: float = self._next(timeout_s)["seconds"]
        return taken

    def pause(self) -> None:
        """Stops all of its processes: some engines use the processor while they wait."""
        stopped: set[psutil.Process] = set()
        while new := self._processes() - stopped:  # what was just being started is found the next time
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            stopped |= new

    def resume(self) -> None:
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def let_go(self) -> None:
        """Begins its end, which `close` waits for. Safe to call twice."""
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1
            assert self._keeper.stdin is not None
            with suppress(OSError):
                self._keeper.stdin.close()

    def close(self) -> None:
        """Ends all of its processes, which have a moment to clean up. Safe to call twice."""
        self.let_go()
        try:
            self._keeper.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def kill(self) -> None:
        """Ends all of its processes at once."""
        if self._hold >= 0:
            with suppress(OSError):
                os.write(self._hold, b"!")
        self.close()

    def _ask(self, line: str) -> None:
        assert self._keeper.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, or is just being closed
            print(line, file=self._keeper.stdin, flush=True)

    def _read(self) -> None:
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except Empty:
            raise EngineTooSlow(f"gave no answer in {timeout_s:.0f} s; see {self._log.name}") from None
        if not line:
            self._answers.put("")  # it has ended the next time, too
            raise EngineFailed(f"has ended; see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _processes(self) -> set[psutil.Process]:
        try:
            return set(psutil.Process(self._keeper.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return set()
