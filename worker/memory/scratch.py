"""Memory that is given back to the system as soon as it is freed."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor for numbers on their way to somewhere else.

    On a CPU it bypasses the allocator, in whose heap the holes that a layer's numbers leave, once they have been
    laid out anew, come to a tenth of a model.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
