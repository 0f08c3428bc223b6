"""Timing of device operations: graph replays over rotating inputs on a GPU, plain calls on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.gpu.record import read_figure

T = TypeVar("T")

# Rotating inputs together exceed the L2 cache of every supported GPU (60 MB on an H200) by this much.
ROTATED_BYTES = 256 << 20
# Samples, of which the median is taken.
NUM_SAMPLES = 7


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def num_copies(num_bytes: int, device: str) -> int:
    """Return how many sets of inputs of `num_bytes` an op must rotate over to read none of them from the L2 cache."""
    if device != "cuda":
        return 1
    return max(1, min(16, -(-ROTATED_BYTES // max(1, num_bytes))))


def seconds_per_call(ops: Sequence[Callable[[], object]], device: str, sample_s: float) -> float:
    """Return the median seconds of an op, which is given once for each of its rotating inputs.

    Args:
        sample_s: least duration of a sample.
    """
    for op in ops:
        op()  # compiles kernels
    run = _recorded(ops) if device == "cuda" else lambda: [op() for op in ops]
    num_runs = max(1, round(sample_s / max(1e-7, _seconds(run, 1, device))))
    return statistics.median(_seconds(run, num_runs, device) for _ in range(NUM_SAMPLES)) / len(ops)


def _recorded(ops: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a replay of all calls as one graph, so that launches cost nothing."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [op() for op in ops]  # noqa: F841  results stay allocated, so no two calls share an output

    replay: Callable[[], object] = graph.replay
    return replay


def _seconds(run: Callable[[], object], num_runs: int, device: str) -> float:
    """Return the seconds of one run, of `num_runs` in a row."""
    if device != "cuda":
        started = time.perf_counter()
        for _ in range(num_runs):
            run()
        return (time.perf_counter() - started) / num_runs
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num_runs):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / num_runs


def copy_rate(num_bytes: int, device: str, sample_s: float) -> float:
    """Return bytes read and written per second of a large copy."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return num_bytes / seconds_per_call([lambda: target.copy_(source)], device, sample_s)


def matmul_rate(length: int, dtype: torch.dtype, device: str, sample_s: float) -> float:
    """Return operations per second of a square matmul of random numbers."""
    a, b = (torch.randn(length, length, device=device).to(dtype) for _ in "ab")
    return 2 * length**3 / seconds_per_call([lambda: a @ b], device, sample_s)


def roof(folder: Path, name: str, measure: Callable[[], float]) -> float:
    """Return a roof that the stage `environment` measured, or measure it."""
    found = read_figure(folder, "environment", f"roof.{name}")
    return measure() if found is None else found
