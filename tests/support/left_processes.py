"""Processes that a test run leaves, found by an environment variable that they inherit."""

from __future__ import annotations

import os
import secrets
import signal
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "QUIRE_TEST_RUN"
GRACE_S = 10.0


def mark_run() -> str | None:
    """Mark this process's future children. Returns None inside of another test run, which ends them."""
    if VARIABLE in os.environ:
        return None
    return os.environ.setdefault(VARIABLE, secrets.token_hex(8))


def kill_left(mark: str, grace_s: float = GRACE_S) -> list[str]:
    """Kill the processes of a marked run that do not end within the time of grace; return their command lines."""
    deadline = time.monotonic() + grace_s
    while (left := _find_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in sorted(left.items())]


def _find_marked(mark: str) -> dict[int, str]:
    """Return pids and command lines of a run's processes, without zombies and without this process."""
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
