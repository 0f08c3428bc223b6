"""Process trees: descendants of processes, waiting for and killing them; usage of processes. Linux only."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


class ProcessTree:
    """Some processes and their present descendants, each held by a pidfd, which a reused pid does not change."""

    def __init__(self, root_pids: Iterable[int]) -> None:
        self._pidfds: dict[int, int] = {}  # pid |-> pidfd
        for pid in _with_descendants(root_pids):
            with suppress(ProcessLookupError):
                self._pidfds[pid] = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> list[int]:
        """Wait until all processes have ended; return the pids of those that have not in time."""
        deadline = time.monotonic() + timeout_s
        for pid, pidfd in list(self._pidfds.items()):
            remaining_s = max(0.0, deadline - time.monotonic())
            # select.select would refuse file descriptors from 1024 on.
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if poller.poll(math.ceil(1000 * remaining_s)):
                os.close(self._pidfds.pop(pid))
        return list(self._pidfds)

    def kill(self) -> None:
        """Kill the processes that have not ended."""
        for pidfd in self._pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def close(self) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


def children(parent_pid: int) -> set[int]:
    """Return the pids of a process's children."""
    return set(_children_by_parent()[parent_pid])


def _with_descendants(root_pids: Iterable[int]) -> list[int]:
    by_parent = _children_by_parent()
    found, unvisited = [], list(root_pids)
    while unvisited:
        found.append(pid := unvisited.pop())
        unvisited.extend(by_parent[pid])
    return found


def _children_by_parent() -> defaultdict[int, list[int]]:
    by_parent = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The second field, the command, is in parentheses and may contain any character.
            parent_pid = int(stat.read_text().rpartition(")")[2].split()[1])
            by_parent[parent_pid].append(int(stat.parent.name))
    return by_parent


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Memory and CPU time of a process."""

    resident_bytes: int
    cpu_s: float


def process_usage(pid: int) -> ProcessUsage | None:
    """Return the usage of a process of this machine; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the name in parentheses, which may have spaces; utime is the 14th field, rss the 24th.
    fields = stat[stat.rindex(")") + 2 :].split()
    user_ticks, system_ticks, resident_pages = int(fields[11]), int(fields[12]), int(fields[21])
    return ProcessUsage(
        resident_pages * os.sysconf("SC_PAGE_SIZE"),
        (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK"),
    )
