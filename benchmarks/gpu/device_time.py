"""Device time of steps: how long kernels ran, how long the device was idle, and which kernels took longest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MAX_KERNELS = 15


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Device time per step.

    Attributes:
        gap_s: idle between kernels.
        kernels: name, calls per step and microseconds per step of the longest kernels.
    """

    busy_s: float
    gap_s: float
    kernels: list[tuple[str, float, float]]


def profile_device(run: Callable[[], object], num_steps: int, device: str) -> DeviceTime | None:
    """Profile `run`, which executes `num_steps` steps. Returns None if the device is a CPU."""
    if device != "cuda":
        run()
        return None
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    return summarize(spans, num_steps)


def summarize(spans: Sequence[tuple[str, float, float]], num_steps: int) -> DeviceTime:
    """Summarize kernels given as (name, start, end) in seconds; they may overlap."""
    busy, gap, end = 0.0, 0.0, None
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, start, stop in sorted(spans, key=lambda span: span[1]):
        totals[name][0] += 1
        totals[name][1] += stop - start
        if end is not None and start > end:
            gap += start - end
        busy += max(0.0, stop - max(start, end if end is not None else start))
        end = stop if end is None else max(end, stop)
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:MAX_KERNELS]
    kernels = [
        (name[:100], round(count / num_steps, 2), round(1e6 * seconds / num_steps, 1))
        for name, (count, seconds) in longest
    ]
    return DeviceTime(busy / num_steps, gap / num_steps, kernels)
