"""CUDA graphs in tests of kernels, which run on a GPU alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def capture(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of the step, and what its replays fill."""
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out
