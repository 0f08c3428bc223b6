"""ProcessExit: how a process of this machine ended, though it is no child of this one. Linux only.

A pidfd that was opened while the process lived keeps its exit status (PIDFD_GET_INFO, Linux 6.15). An older system
tells only that it has ended.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path

from .oom_kills import OomKills

# struct pidfd_info of linux/pidfd.h, in its first version: mask, cgroup, eleven ids, exit status.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3

# For its parent to reap a process that has ended: only then the system tells the status.
_REAP_TIMEOUT_S = 0.25
_REAP_INTERVAL_S = 0.005
MAX_STDERR_BYTES = 4096
MAX_STDERR_LINES = 4
MAX_STDERR_CHARS = 400
# Lines by which Ray's log monitor tells whose output follows.
_RAY_MARKERS = (":job_id:", ":actor_name:", ":task_name:")


class ProcessExit:
    """A live process of this machine, by its pidfd.

    Raises:
        OSError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._oom_kills = OomKills(pid)

    @property
    def has_ended(self) -> bool:
        return self.ends_within(0.0)

    def ends_within(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        poller = select.poll()  # select.select would refuse file descriptors from 1024 on
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(1e3 * timeout_s))

    @property
    def is_stopped(self) -> bool:
        """Return whether the process was stopped, by SIGSTOP or a debugger, and executes nothing."""
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] in "Tt"
        return False

    def open_parent(self) -> ProcessExit:
        """Return the process's parent. Raises OSError if either has ended."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        parent = ProcessExit(int(stat.rpartition(")")[2].split()[1]))
        if self.has_ended:  # the number may have been another process's
            parent.close()
            raise ProcessLookupError(f"process {self.pid} has ended")
        return parent

    def wait(self) -> None:
        """Return when the process has ended. Another thread may call `close` meanwhile."""
        pidfd = os.dup(self._pidfd)
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.poll()
        finally:
            os.close(pidfd)

    def describe(self) -> str:
        """Return how the process ended, and whether memory was lacking, as far as the system tells."""
        return "; ".join(filter(None, (self._describe_status(), self.describe_memory())))

    def describe_memory(self) -> str:
        """Return that the process's control group ran out of memory while it lived; empty if it did not."""
        return self._oom_kills.describe()

    def _describe_status(self) -> str:
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        with suppress(OSError, ValueError):  # ValueError after `close`
            while time.monotonic() < deadline:
                info = fcntl.ioctl(self._pidfd, _GET_INFO, _INFO.pack(_INFO_EXIT, *[0] * 13))
                mask, *_, status = _INFO.unpack(info)
                if mask & _INFO_EXIT:
                    return describe_status(status)
                time.sleep(_REAP_INTERVAL_S)  # no event tells when the parent has reaped it
        return "its process ended"

    def kill(self) -> None:
        """Kill the process, also if it is stopped. Does nothing if it has ended, or after `close`."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close the pidfd. Safe to call twice."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def describe_status(status: int) -> str:
    """Return a wait status in words."""
    if not os.WIFSIGNALED(status):
        return f"its process exited with code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"its process was killed by {name}"


def last_lines(path: str) -> str:
    """Return the last lines of a file in one line, without Ray's markers; empty if it is empty or cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_STDERR_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [
        " ".join(line.split())
        for line in text.splitlines()
        if line.strip() and not line.startswith(_RAY_MARKERS)
    ]
    return " | ".join(lines[-MAX_STDERR_LINES:])[-MAX_STDERR_CHARS:]
