"""Runs of a compiler: as long as it makes progress, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.kernels.native import compiler
from quire.kernels.native.compiler import MAX_CPU_S, MAX_IDLE_S, run_compiler, session_cpu_s, wait_while_busy

_SLICE_S = compiler.LOG_EVERY_S
# A child uses the processor, ends, and is waited for.
_BUSY_CHILD = """
import subprocess, sys, time
subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < 0.2: pass"], check=True)
print("done", flush=True)
time.sleep(600)
"""


class FakeProcess:
    """A process that ends after a number of waits."""

    args = ("c++", "-O3")

    def __init__(self, num_waits: int) -> None:
        self.num_waits = num_waits

    def communicate(self, timeout: float) -> tuple[None, str]:
        self.num_waits -= 1
        if self.num_waits < 0:
            return None, "a warning"
        raise subprocess.TimeoutExpired(self.args, timeout)


def wait(process: FakeProcess, times: Iterator[float]) -> str:
    any_process: Any = process
    return wait_while_busy(any_process, lambda: next(times))


def test_wait_lasts_while_processor_time_is_used(log_of: Callable[[str], list[str]]) -> None:
    """On a machine under load: an hour for 12 s of work, with pauses shorter than MAX_IDLE_S."""
    times = iter([0.1 * (index // 3) for index in range(1, 121)])
    lines = log_of(compiler.__name__)
    assert wait(FakeProcess(120), times) == "a warning"
    assert len(lines) == 120
    assert lines[-1] == "WARNING: waiting for c++, which has used 4 s of processor time"


def test_wait_ends_without_progress() -> None:
    times = iter([1.0, 2.0] + [2.0] * 10)
    with pytest.raises(TimeoutError, match=r"c\+\+ has used no processor time for 120 s"):
        wait(FakeProcess(100), times)
    assert len(list(times)) == 10 - MAX_IDLE_S / _SLICE_S


def test_wait_ends_after_too_much_processor_time() -> None:
    times = iter([MAX_CPU_S - 1, MAX_CPU_S, MAX_CPU_S + 1, MAX_CPU_S + 2])
    with pytest.raises(TimeoutError, match=r"c\+\+ has used 901 s of processor time, more than 900 s"):
        wait(FakeProcess(100), times)


def test_processor_time_includes_that_of_ended_children() -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _BUSY_CHILD], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "done\n"
            assert session_cpu_s(process.pid) > 0.1  # the system counts in whole ticks of 10 ms
        finally:
            process.kill()


def test_compiler_that_is_given_up_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, program = tmp_path / "pipe", tmp_path / "compiler"
    os.mkfifo(pipe)
    program.write_text(f"#!/bin/sh\nsleep 600 > {pipe} &\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(compiler, "LOG_EVERY_S", 0.05)
    monkeypatch.setattr(compiler, "MAX_IDLE_S", 0.5)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(TimeoutError, match="compiler has used no processor time"):
            run_compiler([str(program)])
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b"", "the child has closed its end of the pipe"
    finally:
        os.close(reader)


def test_failure_has_the_words_of_the_compiler() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_compiler(["/bin/sh", "-c", "echo no such header >&2; exit 3"])
    assert (caught.value.returncode, caught.value.stderr) == (3, "no such header\n")
