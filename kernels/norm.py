"""RMSNorm (Zhang and Sennrich, 2019), alone and after the residual addition."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension.

    Args:
        x: [..., E].
        weight: [E].
    """
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the sum normalised.

    Args:
        x, residual: [T, E].
        weight: [E].
    """
    return rms_norm(residual.add_(x), weight, eps)
