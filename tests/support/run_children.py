"""Processes that a test run starts, found by an environment variable that they inherit.

``python run_children.py PID MARK GRACE_S`` waits until process PID, which runs the tests, has ended, and kills the
processes that it left: a killed test run cleans nothing up.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "QUIRE_TEST_RUN"
GRACE_S = 10.0


def start_run(grace_s: float = GRACE_S) -> subprocess.Popen[bytes] | None:
    """Mark this process's future children and start their guard. Returns None inside of another test run."""
    if VARIABLE in os.environ:
        return None
    mark = secrets.token_hex(8)
    command = [sys.executable, "-S", __file__, str(os.getpid()), mark, str(grace_s)]
    guard = subprocess.Popen(command, start_new_session=True)
    os.environ[VARIABLE] = mark
    return guard


def end_run(guard: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> list[str]:
    """Kill the processes that do not end within the time of grace, stop the guard, and return their command lines."""
    left = _end_marked(os.environ.pop(VARIABLE), grace_s)
    guard.kill()
    guard.wait()
    return left


def _end_marked(mark: str, grace_s: float) -> list[str]:
    deadline = time.monotonic() + grace_s
    killed = {}
    while marked := _find_marked(mark):
        for pid, command in marked.items():
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                if not _has_ended(pidfd, max(0.0, deadline - time.monotonic())):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    killed[pid] = command
                    assert _has_ended(pidfd, GRACE_S), f"process {pid} survives SIGKILL: {command}"
                os.close(pidfd)
    return [f"{pid}: {command}" for pid, command in sorted(killed.items())]


def _has_ended(pidfd: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else math.ceil(1000 * timeout_s)))


def _find_marked(mark: str) -> dict[int, str]:
    """Return pids and command lines of this run's processes, without zombies and without this process."""
    variable = f"{VARIABLE}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            if variable not in (folder / "environ").read_bytes().split(b"\0"):
                continue  # a zombie's environment is empty
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if int(folder.name) != os.getpid() and "resource_tracker" not in command:
                found[int(folder.name)] = command
    return found


def _guard(test_run: int, mark: str, grace_s: float) -> None:
    with suppress(ProcessLookupError):
        _has_ended(os.pidfd_open(test_run), None)
    for process in _end_marked(mark, grace_s):
        print(f"killed a process that the test run left, {process}", file=sys.stderr)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
