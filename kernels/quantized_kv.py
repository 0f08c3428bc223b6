"""Quantized KV caches: one byte per number, and a scale per token and head.

The scale maps the largest magnitude of the vector to the limit of the type. Or all keys of a layer have one scale,
and all values another, which are known before (fixed scales). Attention reads them as if they were those of tokens.

Scales are float32 [N, 2, Hkv, B] of a cache [N, 2, Hkv, B, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

# Largest magnitude of each type. -128 is unused, so that int8 is symmetric.
LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Lower bound of the largest magnitude of a vector: the scale of a vector of zeros must not be 0.
MIN_MAGNITUDE = 1e-12


def quantize(x: Tensor, dtype: torch.dtype, fixed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize vectors [..., D] to a type of LIMITS. Returns codes [..., D] and scales [...] float32.

    Args:
        fixed: scales that [...] is broadcast to; None: of the largest magnitudes.
    """
    limit = LIMITS[dtype]
    x = x.float()
    if fixed is None:
        scales = x.abs().amax(dim=-1).clamp_(min=MIN_MAGNITUDE) / limit
    else:
        scales = fixed.expand(x.shape[:-1])
    # Rounding may exceed the limit, where float8 has NaN and int8 wraps around.
    ratios = (x / scales.unsqueeze(-1)).clamp_(-limit, limit)
    if dtype == torch.int8:
        ratios.add_(0.5).floor_()
    return ratios.to(dtype), scales


def dequantize(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert `quantize`: [..., D] and [...] -> [..., D] of `dtype`."""
    return (stored.float() * scales.unsqueeze(-1)).to(dtype)
