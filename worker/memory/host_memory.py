"""Memory that a process on this machine can still allocate."""

from __future__ import annotations

import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# Memory limit of the container, if it has one (Linux cgroup v2).
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes available without swapping and within the container's limit. Returns None if unknown."""
    known = [num for num in (_machine_bytes(meminfo), _container_bytes(cgroup)) if num is not None]
    return min(known, default=None)


def _machine_bytes(meminfo: Path) -> int | None:
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


def _container_bytes(cgroup: Path) -> int | None:
    """Return the bytes left below the container's limit; inactive page cache counts as free."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        files = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + (0 if files is None else int(files[1])))
