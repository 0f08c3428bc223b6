"""From the host to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Where arrays of one transfer begin: kernels are compiled anew for a tensor that lies otherwise.
_ALIGNMENT = 16
_DTYPES = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


def to_device(values: npt.ArrayLike, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy on the device; the host does not wait for it."""
    return _send(torch.from_numpy(np.array(values)).to(dtype), device)


def to_device_together(arrays: list[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies of several arrays in one transfer, in their own types; the host does not wait for it."""
    if device.type == "cpu":
        return [torch.from_numpy(array.copy()) for array in arrays]
    return unpack(_send(pack(arrays), device), arrays)


def pack(arrays: list[npt.NDArray[Any]]) -> Tensor:
    """All of them in one tensor of bytes."""
    starts = _starts(arrays)
    packed = np.empty(starts[-1], dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        np.ndarray(array.shape, array.dtype, packed.data, start)[...] = array
    return torch.from_numpy(packed)


def unpack(packed: Tensor, arrays: list[npt.NDArray[Any]]) -> list[Tensor]:
    """Views of what `pack` has made of arrays of these shapes and types."""
    return [
        packed[start : start + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for array, start in zip(arrays, _starts(arrays), strict=False)
    ]


def _starts(arrays: list[npt.NDArray[Any]]) -> list[int]:
    """Where each begins, and the length of all."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
