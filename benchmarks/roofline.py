"""Roofline model: an op's figures beside the machine's limits (Williams et al., *Roofline*, 2009)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Figure

QUIRE = "quire"


@dataclass(frozen=True, slots=True)
class Roof:
    """Limits of a machine, measured in the same process.

    Attributes:
        copy: bytes read and written per second.
        matmul: floating-point operations per second.
    """

    copy: float
    matmul: float

    def figures(self) -> dict[str, Figure]:
        return {
            "kernels.copy.gb_per_s": Figure(self.copy / 1e9, "GB/s"),
            "kernels.matmul.gflops": Figure(self.matmul / 1e9, "GFLOP/s"),
        }


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape.

    Attributes:
        name: ``kernels.<op>.<shape>``.
        num_bytes: bytes that the op must read and write.
        flops: floating-point operations; 0 if negligible beside the bytes.
        seconds: implementation |-> seconds per call; ours is `QUIRE`.
    """

    name: str
    num_bytes: int
    flops: int
    seconds: dict[str, float]

    def figures(self, roof: Roof) -> dict[str, Figure]:
        """Return the microseconds of all implementations, and the share of the roof that ours reaches."""
        own = self.seconds[QUIRE]
        if self.flops * roof.copy > self.num_bytes * roof.matmul:
            bound, share = "matmul", self.flops / own / roof.matmul
        else:
            bound, share = "copy", self.num_bytes / own / roof.copy
        figures = {f"{self.name}.us": Figure(1e6 * own, "us")}
        figures[f"{self.name}.share_of_{bound}"] = Figure(share, "")
        for peer, seconds in self.seconds.items():
            if peer != QUIRE:
                figures[f"{self.name}.{peer}_us"] = Figure(1e6 * seconds, "us")
        return figures


def plot(path: Path, title: str, roof: Roof, cases: Sequence[Case]) -> None:
    """Plot every case below the roof, one color per op.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (the extra ``bench``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_op: dict[str, list[Case]] = {}
    for case in cases:
        by_op.setdefault(case.name.split(".")[1], []).append(case)
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    # An op with negligible arithmetic is plotted at one operation per 8 bytes.
    places = {op: [max(case.flops / case.num_bytes, 1 / 8) for case in own] for op, own in by_op.items()}
    low, high = 1 / 16, 4 * max(roof.matmul / roof.copy, *(max(own) for own in places.values()))
    ridge = roof.matmul / roof.copy
    axes.plot(
        [low, ridge, high], [low * roof.copy / 1e9, roof.matmul / 1e9, roof.matmul / 1e9], color="black", lw=1
    )
    axes.annotate(f"copy: {roof.copy / 1e9:,.0f} GB/s", (low, 1.25 * low * roof.copy / 1e9))
    label = f"matmul: {roof.matmul / 1e9:,.0f} GFLOP/s"
    axes.annotate(label, (high, 0.9 * roof.matmul / 1e9), ha="right", va="top")
    for (op, own), color in zip(by_op.items(), matplotlib.color_sequences["tab20"], strict=False):
        heights = [
            place * case.num_bytes / case.seconds[QUIRE] / 1e9
            for place, case in zip(places[op], own, strict=True)
        ]
        axes.scatter(places[op], heights, s=28, color=color, label=op.replace("_", " "))
    axes.set(xscale="log", yscale="log", xlabel="operations per byte that must be moved", ylabel="GFLOP/s")
    axes.set_title(title)
    axes.legend(fontsize="small", ncols=2, loc="lower right")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
