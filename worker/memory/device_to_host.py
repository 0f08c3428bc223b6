"""Copies from the device to the host that the host waits for later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class HostCopy:
    """Copies of tensors of one device in host memory.

    A GPU copies them to pinned memory after everything launched so far, and the host goes on. Copies of tensors on a
    CPU are the tensors themselves.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cpu:
            self._copies = list(tensors)
            return
        self._copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[npt.NDArray[Any]]:
        """Wait for the copies and return them as arrays."""
        if self._event is not None:
            self._event.synchronize()
        return [np.asarray(copy.numpy()) for copy in self._copies]
