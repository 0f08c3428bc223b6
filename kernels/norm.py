"""RMSNorm (Zhang and Sennrich, 2019), with and without a preceding residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import on_gpu
from .native import ops as cpu
from .quantized_linear import quantize_tokens


@on_gpu("norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension.

    Args:
        x: [..., E].
        weight: [E].
    """
    if x.dim() <= 3 and x.stride(-1) == 1 and cpu.supports(x, x.shape[-1]):
        return cpu.rms_norm(x, weight, eps)
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)


@on_gpu("norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place and return the normalized sum.

    Args:
        x, residual: [T, E].
        weight: [E].
    """
    if x.is_contiguous() and residual.is_contiguous() and cpu.supports(x, x.shape[-1]):
        return cpu.add_rms_norm(x, residual, weight, eps)
    return rms_norm(residual.add_(x), weight, eps)


@on_gpu("norm")
def add_rms_norm_float8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As add_rms_norm, with the result quantized to float8, one scale per token, for float8 linear layers.

    Returns:
        Codes [T, E] float8_e4m3fn, and scales [T, 1] float32 that multiply them.
    """
    return quantize_tokens(add_rms_norm(x, residual, weight, eps))
