"""Exit status of a killed process that is no child of the one that asks, as far as this kernel tells it."""

from __future__ import annotations

import os


def has_exit_status() -> bool:
    """Return whether the status of a process that was reaped can be read (Linux 6.15)."""
    release = os.uname().release.split(".")
    return (int(release[0]), int(release[1].partition("-")[0])) >= (6, 15)


KILLED = "its process was killed by SIGKILL" if has_exit_status() else "its process ended"
