"""Copies from the host to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Alignment in bytes of each array of a transfer: Triton recompiles a kernel for tensors of another alignment.
_ALIGNMENT = 16
_DTYPES = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


def to_device(values: npt.ArrayLike, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy values to the device; the host does not wait for the transfer."""
    return _send(torch.from_numpy(np.array(values)).to(dtype), device)


def to_device_once(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array that nothing changes afterwards; on a CPU the tensor shares its memory."""
    return _send(torch.from_numpy(array), device)


def to_device_together(arrays: list[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy several arrays in one transfer, each in its own dtype; the host does not wait for the transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(array.copy()) for array in arrays]
    return unpack(_send(pack(arrays), device), arrays)


def pack(arrays: list[npt.NDArray[Any]]) -> Tensor:
    """Pack arrays into one tensor of bytes."""
    starts = _starts(arrays)
    packed = np.empty(starts[-1], dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        np.ndarray(array.shape, array.dtype, packed.data, start)[...] = array
    return torch.from_numpy(packed)


def unpack(packed: Tensor, arrays: list[npt.NDArray[Any]]) -> list[Tensor]:
    """Return views of a tensor packed from arrays of these shapes and dtypes."""
    return [
        packed[start : start + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for array, start in zip(arrays, _starts(arrays), strict=False)
    ]


def _starts(arrays: list[npt.NDArray[Any]]) -> list[int]:
    """Return the offset of each array, and the total length in bytes."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
