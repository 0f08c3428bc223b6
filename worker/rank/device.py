"""Compute devices, for modules that must not import torch: detection, and a thread's current device."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


# The library of NVIDIA's driver.
_CUDA_DRIVER = "libcuda.so.1"


def cuda_device_count() -> int:
    """Return the number of CUDA GPUs that this process can see. Imports torch only if the machine has a driver."""
    if not _has_cuda_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def compute_device(kind: str, ordinal: int | None = None) -> torch.device:
    """Return the device of a rank.

    Args:
        kind: ``cpu`` or ``cuda``.
        ordinal: index of the GPU among those that this process can see; None for this thread's current one.
    """
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index() if ordinal is None else ordinal)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` the current device of this thread in the body; does nothing for a CPU.

    CUDA keeps the current device per thread, 0 at first. Allocations of pinned memory, streams, Triton's launches and
    NCCL use it, whichever device their tensors are on.
    """
    import torch

    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return False
    return True
