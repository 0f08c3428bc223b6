"""Figures of ops relative to the roofline, and their plot."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.common import image_path
from benchmarks.roofline import QUIRE, Case, Roof, plot

ROOF = Roof(copy=100.0, matmul=800.0)
MOVING = Case("kernels.copying.small", num_bytes=1000, flops=2000, seconds={QUIRE: 20.0, "torch": 40.0})
COMPUTING = Case("kernels.computing.large", num_bytes=1000, flops=16000, seconds={QUIRE: 40.0})


def test_figures_compare_with_the_lower_roof() -> None:
    figures = MOVING.figures(ROOF)
    assert {name: figure.value for name, figure in figures.items()} == {
        "kernels.copying.small.us": 20e6,
        "kernels.copying.small.share_of_copy": 0.5,
        "kernels.copying.small.torch_us": 40e6,
    }
    assert COMPUTING.figures(ROOF)["kernels.computing.large.share_of_matmul"].value == 0.5


def test_plot_writes_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    plot(path, "a machine", ROOF, [MOVING, COMPUTING])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_image_path_is_refused_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert image_path("x.png") == Path("x.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match="matplotlib"):
        image_path("x.png")
