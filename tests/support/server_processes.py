"""Processes of a server or a Ray node, found by what their command lines say; processes may end meanwhile."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> str:
    """Return the command line; empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie as well
        return ""


def processes_with(name: str, *pids: int) -> list[psutil.Process]:
    """Return the processes below these ones whose command line has the name; the machine may run others."""
    children = (child for pid in pids for child in psutil.Process(pid).children(recursive=True))
    return [child for child in children if name in command_of(child)]


def pid_of(name: str, pid: int) -> int:
    """Return the pid of the only process below another one whose command line has the name."""
    (found,) = processes_with(name, pid)
    return found.pid
