"""How much memory a process on this machine may still take."""

from __future__ import annotations

import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# Of the container that the process is in, where that has a limit (Linux's cgroup v2).
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """What the machine can give without swapping and the container may have; None where neither says so."""
    known = [found for found in (_left_on_machine(meminfo), _left_in_container(cgroup)) if found is not None]
    return min(known, default=None)


def _left_on_machine(meminfo: Path) -> int | None:
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


def _left_in_container(cgroup: Path) -> int | None:
    """Files that the system keeps in memory count as used, but give way."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        files = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + (0 if files is None else int(files[1])))
