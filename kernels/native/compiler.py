"""Run of a C++ compiler, for as long as it makes progress.

A limit of elapsed time would depend on the load: a minute of work took more than 5 beside 30 other programs, and all
ops then ran on PyTorch.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

# Processor time of one run, which takes 10 to 60 s; and the time without any after which a compiler hangs.
MAX_CPU_S = 900.0
MAX_IDLE_S = 120.0
LOG_EVERY_S = 30.0

_log = logging.getLogger(__name__)


def run_compiler(command: Sequence[str]) -> None:
    """Run a compiler.

    Raises:
        subprocess.CalledProcessError: it failed.
        TimeoutError: it used no processor time for MAX_IDLE_S, or more than MAX_CPU_S. It was killed.
    """
    # A session of its own, since a compiler starts programs that do the work.
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            errors = wait_while_busy(process, lambda: session_cpu_s(process.pid))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=errors)


def wait_while_busy(process: subprocess.Popen[str], used_cpu_s: Callable[[], float]) -> str:
    """Wait for a process and return its stderr; log every LOG_EVERY_S what is waited for.

    Args:
        used_cpu_s: returns the processor time that it has used until now.

    Raises:
        TimeoutError: as from `run_compiler`.
    """
    name, used_s, idle_s = str(process.args[0]), 0.0, 0.0  # type: ignore[index]  # a sequence
    while True:
        try:
            return process.communicate(timeout=LOG_EVERY_S)[1]
        except subprocess.TimeoutExpired:
            before_s, used_s = used_s, used_cpu_s()
        idle_s = 0.0 if used_s > before_s else idle_s + LOG_EVERY_S
        _log.warning("waiting for %s, which has used %.0f s of processor time", name, used_s)
        if used_s > MAX_CPU_S:
            raise TimeoutError(
                f"{name} has used {used_s:.0f} s of processor time, more than {MAX_CPU_S:.0f} s"
            )
        if idle_s >= MAX_IDLE_S:
            raise TimeoutError(f"{name} has used no processor time for {idle_s:.0f} s")


def session_cpu_s(session: int) -> float:
    """Return the processor time that the processes of a session and their ended children have used, in seconds."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field, the program's name, may contain spaces and parentheses. The session is the sixth
            # field, the times are fields 14 to 17.
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
