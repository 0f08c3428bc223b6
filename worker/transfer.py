"""From the host to the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: npt.ArrayLike, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy on the device; the host does not wait for it."""
    tensor = torch.from_numpy(np.array(values)).to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
