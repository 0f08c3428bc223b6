"""RMSNorm (Zhang and Sennrich, 2019), alone and after the residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import on_gpu
from .native import ops as cpu
from .quantized_linear import quantize_tokens


@on_gpu("norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension.

    Args:
        x: [..., E].
        weight: [E].
    """
    if x.dim() <= 3 and x.stride(-1) == 1 and cpu.supports(x, x.shape[-1]):
        return cpu.rms_norm(x, weight, eps)
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)


@on_gpu("norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the sum normalised.

    Args:
        x, residual: [T, E].
        weight: [E].
    """
    if x.is_contiguous() and residual.is_contiguous() and cpu.supports(x, x.shape[-1]):
        return cpu.add_rms_norm(x, residual, weight, eps)
    return rms_norm(residual.add_(x), weight, eps)


@on_gpu("norm")
def add_rms_norm_float8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As add_rms_norm, the result rounded to float8, each token by its own scale, for float8 linears.

    Returns:
        [T, E] float8_e4m3fn, and scales [T, 1] float32 that they are to be multiplied by.
    """
    return quantize_tokens(add_rms_norm(x, residual, weight, eps))
