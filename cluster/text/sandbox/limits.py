"""Limits of an operation's memory and processor time, set by the process that carries it out."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def limits(
    memory_bytes: int,
    time_s: float = 0,
    on_time_over: Callable[[int, Any], None] | signal.Handlers = signal.SIG_DFL,
) -> Iterator[None]:
    """Limit the memory of the process, and if `time_s` is not 0 its processor time.

    Args:
        memory_bytes: memory of the whole process; more of it raises MemoryError.
        on_time_over: raises an exception in Python code; by default the process ends, also within a library.
    """
    hard_bytes = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard_bytes))
    signal.signal(signal.SIGPROF, on_time_over)
    signal.setitimer(signal.ITIMER_PROF, time_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard_bytes, hard_bytes))


def used_bytes() -> int:
    """Return the address space that the process uses now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
