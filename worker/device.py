"""What this machine has to compute on, for those that must not import torch."""

from __future__ import annotations


def cuda_device_count() -> int:
    """CUDA GPUs that this process can see."""
    import torch

    return torch.cuda.device_count()
