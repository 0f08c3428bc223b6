"""CUDA graphs for kernel tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def capture(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record the step as a graph; return the graph and the output that its replays overwrite."""
    step()  # compiles kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out
