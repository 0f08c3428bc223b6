"""OomKills: whether the kernel's out-of-memory killer has ended processes of a control group since a moment."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

# A limit of version 1 that is none: the largest number of pages.
_NO_LIMIT = 1 << 62
_CGROUPS = Path("/sys/fs/cgroup")
# Files with the line `oom_kill N`, and with the limit, of version 1 and 2.
_COUNTERS = ("memory.oom_control", "memory.events")
_LIMITS = ("memory.limit_in_bytes", "memory.max")


class OomKills:
    """The out-of-memory kills in the control group of a process since this object was made.

    A control group is the set of processes that share a memory limit, for example a container. Where the system
    counts no kills, there are none.
    """

    def __init__(self, pid: int, cgroups: Path = _CGROUPS) -> None:
        self._folder = _memory_group(pid, cgroups)
        self._before = self._count()

    def describe(self) -> str:
        """Return that there were kills, and the group's limit; empty if there were none."""
        if self._folder is None or self._count() <= self._before:
            return ""
        limit = _read_limit(self._folder)
        of_limit = "" if limit is None else f" (limit {limit / (1 << 20):,.0f} MiB)"
        return f"its control group ran out of memory{of_limit}, and the kernel killed a process there"

    def _count(self) -> int:
        if self._folder is not None:
            for name in _COUNTERS:
                with suppress(OSError, ValueError):
                    lines = (self._folder / name).read_text().splitlines()
                    counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
                    return sum(counts)
        return 0


def _memory_group(pid: int, cgroups: Path) -> Path | None:
    """Return the folder of a process's control group that limits its memory; None if there is none to be seen."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("memory", ""):
                continue
            root = cgroups / controllers
            # In a container the path may be that of the host, and the container's own group is the root.
            for folder in (root / path.lstrip("/"), root):
                if any((folder / name).exists() for name in _COUNTERS):
                    return folder
    return None


def _read_limit(folder: Path) -> int | None:
    """Return a group's memory limit in bytes; None if it has none."""
    for name in _LIMITS:
        with suppress(OSError, ValueError):
            limit = int((folder / name).read_text())  # `max` is no number
            return limit if limit < _NO_LIMIT else None
    return None
