"""An inference engine in its own processes, driven over pipes."""

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
from benchmarks.peers.install import ENVIRONMENTS, python_path

FOLDER = Path(__file__).parent
MODULES = {
    "quire": "quire_engine.py",
    "quire-avx512": "quire_engine.py",
    "vllm": "vllm_engine.py",
    "transformers": "transformers_engine.py",
    "llama.cpp": "llama_cpp_engine.py",
    "llama.cpp-avx2": "llama_cpp_engine.py",
    "ctranslate2": "ctranslate2_engine.py",
}
# Of engines that differ only by them.
VARIABLES = {"quire-avx512": {"QUIRE_CPU_ISA": "avx512"}}
# Engines that a comparison on one rank runs unless it names others.
DEFAULT = tuple(name for name in MODULES if name not in ("quire-avx512", "llama.cpp-avx2"))
# Engines with tensor parallelism.
TENSOR_PARALLEL = ("quire", "vllm")
# More than the supervisor's END_TIMEOUT_S.
CLOSE_TIMEOUT_S = 60.0


class EngineFailed(Exception):
    """An engine did not start, has exited or did not answer. The message is a predicate without a subject."""


class EngineTooSlow(EngineFailed):
    """An engine did not answer before its timeout."""


class Engine:
    """One engine with a model. Its processes end with this process in any case (see supervisor).

    Args:
        environments: folder of benchmarks.peers.install; quire itself runs in the current environment, as do
            all engines if it is None.
        options: see engine.parse_arguments.
        log: file to which the engine's output is appended.
        load_timeout_s: time limit for loading the model.
        counts_processor_time: `seconds` are those of all threads of the engine's first process.

    Attributes:
        load_s: loading time.

    Raises:
        EngineFailed: the engine did not start.
    """

    def __init__(
        self,
        name: str,
        environments: Path | None,
        options: list[str],
        log: Path,
        load_timeout_s: float,
        *,
        counts_processor_time: bool = False,
    ) -> None:
        self._clock = "processor_s" if counts_processor_time else "seconds"
        python = Path(sys.executable)
        if environments is not None and name in ENVIRONMENTS:
            python = python_path(environments, name)
        if not python.exists():
            raise EngineFailed("is not installed")
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        pipe, write_end = os.pipe()
        self._alive_pipe: int | None = write_end  # open as long as the supervisor is to keep the engine
        with log.open("a") as errors:
            self._supervisor = subprocess.Popen(
                [sys.executable, str(FOLDER / "supervisor.py"), str(pipe), python, FOLDER / MODULES[name], *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                pass_fds=[pipe],
                env=os.environ | VARIABLES.get(name, {}),
                start_new_session=True,  # Ctrl-C must reach only this process
            )  # fmt: skip
        os.close(pipe)
        self._results: SimpleQueue[str] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()
        try:
            self.load_s: float = self._receive(load_timeout_s)["load_s"]
        except BaseException:
            self.kill()
            raise

    def seconds(self, requests: Requests, timeout_s: float) -> float:
        """Submit all requests together and return the seconds until all have finished.

        Raises:
            EngineTooSlow: the timeout passed; the engine is still computing, so `kill` it.
            EngineFailed: the engine has exited.
        """
        # In a thread: an engine that does not read its stdin must not block this one.
        Thread(target=self._send, args=(json.dumps(requests),), daemon=True).start()
        elapsed: float = self._receive(timeout_s)[self._clock]
        return elapsed

    def pause(self) -> None:
        pause_children(self._supervisor.pid)

    def resume(self) -> None:
        resume_children(self._supervisor.pid)

    def begin_close(self) -> None:
        """Ask the engine to exit, without waiting; `close` waits. Safe to call twice."""
        if self._alive_pipe is not None:
            os.close(self._alive_pipe)
            self._alive_pipe = None
            assert self._supervisor.stdin is not None
            with suppress(OSError):
                self._supervisor.stdin.close()

    def close(self) -> None:
        """End all of the engine's processes, with time to clean up. Safe to call twice."""
        self.begin_close()
        try:
            self._supervisor.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    def kill(self) -> None:
        """Kill all of the engine's processes at once."""
        if self._alive_pipe is not None:
            with suppress(OSError):
                os.write(self._alive_pipe, b"!")
        self.close()

    def _send(self, line: str) -> None:
        assert self._supervisor.stdin is not None
        with suppress(OSError, ValueError):  # the engine has exited or is being closed
            print(line, file=self._supervisor.stdin, flush=True)

    def _read(self) -> None:
        assert self._supervisor.stdout is not None
        for line in self._supervisor.stdout:
            self._results.put(line)
        self._results.put("")

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._results.get(timeout=timeout_s)
        except Empty:
            raise EngineTooSlow(f"gave no answer in {timeout_s:.0f} s; see {self._log.name}") from None
        if not line:
            self._results.put("")  # the next call must find the end as well
            raise EngineFailed(f"has ended; see {self._log.name}")
        result: dict[str, Any] = json.loads(line)
        return result

    def _processes(self) -> set[psutil.Process]:
        return _children(self._supervisor.pid)


def pause_children(pid: int) -> None:
    """Stop all processes below one with SIGSTOP: some engines use the CPU while they wait."""
    stopped: set[psutil.Process] = set()
    while new := _children(pid) - stopped:  # until no new process appears
        for process in new:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped |= new


def resume_children(pid: int) -> None:
    for process in _children(pid):
        with suppress(psutil.NoSuchProcess):
            process.resume()


def processor_s(pid: int) -> float:
    """Return the processor time that a process and all below it have used, those included that have ended."""
    used = 0.0
    for process in _children(pid) | {psutil.Process(pid)}:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system + times.children_user + times.children_system
    return used


def _children(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()
