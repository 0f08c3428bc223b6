"""Plots of benchmark results. Needs matplotlib, from the extra ``bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from benchmarks.autoscale import FleetRun
from benchmarks.trace import Trace

# Bins of time per trace: one bar or point each.
NUM_BINS = 120
COLORS = {"fixed": "0.6", "quire": "tab:blue", "ongoing_requests": "tab:orange"}


def draw_scaling(
    path: Path, traces: Sequence[tuple[Trace, dict[str, tuple[FleetRun, str]]]], target_wait_s: float
) -> None:
    """Draw one column per trace: its load, the number of replicas, and the waiting times."""
    figure, axes = plt.subplots(3, len(traces), figsize=(6 * len(traces), 8), sharex="col", squeeze=False)
    for (trace, runs), (load, replicas, waits) in zip(traces, axes.T, strict=True):
        edges = np.linspace(0, trace.requests[-1].arrival_s, NUM_BINS + 1)
        _draw_load(load, trace, edges)
        for policy, (run, _) in runs.items():
            at, started, ready = np.array(run.history).T
            replicas.step(at / 60, started, where="post", color=COLORS[policy], label=policy)
            replicas.fill_between(at / 60, ready, step="post", color=COLORS[policy], alpha=0.15)
            _draw_waits(waits, run, edges, COLORS[policy], policy)
        waits.axhline(target_wait_s, color="tab:red", linewidth=0.8, label="target")
        load.set_title(trace.name)
        waits.set_xlabel("minutes")
    for axis, label in zip(
        axes[:, 0], ("prompt tokens/s", "replicas", "99th percentile of waits, s"), strict=True
    ):
        axis.set_ylabel(label)
    axes[1, 0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _draw_load(axis: Axes, trace: Trace, edges: np.ndarray) -> None:
    arrivals = [request.arrival_s for request in trace.requests]
    tokens = [request.num_prompt_tokens for request in trace.requests]
    sums, _ = np.histogram(arrivals, edges, weights=tokens)
    axis.bar(edges[:-1] / 60, sums / np.diff(edges), np.diff(edges) / 60, align="edge", color="0.4")


def _draw_waits(axis: Axes, run: FleetRun, edges: np.ndarray, color: str, label: str) -> None:
    waits = np.array([request.wait_s for request in run.requests])
    bins = np.digitize([request.traced.arrival_s for request in run.requests], edges) - 1
    worst = [np.percentile(waits[bins == i], 99) if (bins == i).any() else np.nan for i in range(NUM_BINS)]
    axis.plot(edges[:-1] / 60, worst, color=color, label=label)
