"""CPU time of a server's processes and of its callers."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

# In the name that Ray gives the process of a rank.
_RANK = "WorkerActor"


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU time in seconds.

    Attributes:
        callers_s: of this process.
        server_s: of the gateway, the scheduler and Ray.
    """

    callers_s: float
    server_s: float

    def __add__(self, other: CpuTimes) -> CpuTimes:
        return CpuTimes(self.callers_s + other.callers_s, self.server_s + other.server_s)

    def __sub__(self, other: CpuTimes) -> CpuTimes:
        return self + other * -1.0

    def __mul__(self, factor: float) -> CpuTimes:
        return CpuTimes(self.callers_s * factor, self.server_s * factor)

    def __truediv__(self, divisor: float) -> CpuTimes:
        return self * (1.0 / divisor)


class CpuMeter:
    """Reads the CPU time of this process, and of the processes of a server that is ready.

    The ranks are left out: they take what the others leave.

    Args:
        pid: of the server's first process.
    """

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        self._seconds = {root: 0.0}  # process of the server |-> its CPU time when last read
        for process in root.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if not any(_RANK in word for word in process.cmdline()):
                    self._seconds[process] = 0.0

    def read(self) -> CpuTimes:
        """Return the CPU time since the processes started."""
        for process in self._seconds:
            with suppress(psutil.NoSuchProcess):  # it has ended, and its last time stays
                times = process.cpu_times()
                self._seconds[process] = times.user + times.system
        return CpuTimes(time.process_time(), sum(self._seconds.values()))
