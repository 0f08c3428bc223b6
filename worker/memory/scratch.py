"""Temporary memory that returns to the system as soon as it is freed."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def empty_scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor for temporary data.

    On a CPU it bypasses the allocator: after the weights have been packed, the freed originals would leave holes in
    the heap that add up to a tenth of the model.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
