"""CPU time of refused calls."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.overload_calls import Call
from benchmarks.overload_cpu import CpuMeter, CpuTimes
from benchmarks.overload_server import NUM_CORES, Overload, Peak


def test_meter_reads_the_processes_of_the_server_but_ranks() -> None:
    work = "import time\nwhile time.process_time() < 0.05: pass\nprint(); input()"
    # A child that is named as a rank, and works as well.
    rank = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {work!r}, 'WorkerActor.run']).wait()"
    with subprocess.Popen(
        [sys.executable, "-c", rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        meter = CpuMeter(server.pid)
        assert [process.pid for process in meter._seconds] == [server.pid]
        assert meter.read().server_s > 0
        server.communicate("\n", timeout=60)
    assert meter.read().server_s > 0  # the last time of a process that has ended


def test_overload_compares_with_the_peaks_before_and_after_it() -> None:
    peaks = [Peak(100.0, 1.0, CpuTimes(0.1, 0.2), 0.0), Peak(200.0, 1.0, CpuTimes(0.3, 0.4), 0.0)]
    calls = [Call(0.0, 1.0, 10)] * 2 + [Call(0.0, 0.1, 0, "OVERLOADED")] * 4
    overload = Overload()
    overload.add(calls, 120.0, CpuTimes(0.8, 1.4), 8.0, peaks)
    assert overload.shares == [pytest.approx(0.8)]
    assert overload.shares_per_core == [pytest.approx(0.8 * NUM_CORES / (NUM_CORES - 0.1))]
    (cpu,) = overload.refusal_cpu
    assert cpu.callers_s == pytest.approx(0.1)
    assert cpu.server_s == pytest.approx(0.2)


def test_overload_without_a_refused_call_has_no_time_per_refused_call() -> None:
    overload = Overload()
    peak = Peak(100.0, 1.0, CpuTimes(0.1, 0.2), 0.0)
    overload.add([Call(0.0, 1.0, 10)], 100.0, CpuTimes(0.1, 0.2), 8.0, [peak, peak])
    assert overload.refusal_cpu == []
