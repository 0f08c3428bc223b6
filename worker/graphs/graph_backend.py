"""Recording of device operations, for graphs of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.workspace import workspaces


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded computation.

    Attributes:
        output: result, overwritten by each replay.
        workspaces: memory whose addresses were recorded; kept as long as the recording.
    """

    replay: Callable[[], None]
    output: Tensor
    workspaces: tuple[Tensor, ...] = ()


class GraphBackend(Protocol):
    """Recorder of the device operations of a function."""

    def warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Execute `compute`, as a step would, for what cannot be done while recording."""
        ...

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Record `compute`, without executing it, after `warm_up`.

        Raises:
            RuntimeError: the device cannot, for example because `compute` synchronizes.
        """
        ...


class CudaGraphs:
    """CUDA graphs that share a memory pool; no two of them may run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Compile the kernels and allocate their workspaces."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as NCCL's watchdog, may query the device during the capture.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            output = compute()
        return Recording(graph.replay, output, workspaces(self._device))
