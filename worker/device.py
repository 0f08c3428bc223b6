"""Detection of compute devices, for modules that must not import torch."""

from __future__ import annotations


def cuda_device_count() -> int:
    """Return the number of CUDA GPUs that this process can see."""
    import torch

    return torch.cuda.device_count()
