"""Keys and values in one byte a number, with a scale for each token and head: the largest magnitude fills the range.

Scales are float32 and lie beside the cache [N, 2, Hkv, B, D] as [N, 2, Hkv, B].
"""

from __future__ import annotations

import torch
from torch import Tensor

# Largest magnitudes. -128 is left out, so that int8 is symmetric.
LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Magnitudes below it are taken for it: a vector of zeros has a scale that divides.
MIN_MAGNITUDE = 1e-12


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors [..., D] as numbers of a type of LIMITS, [..., D], and their scales, [...] float32."""
    limit = LIMITS[dtype]
    x = x.float()
    scales = x.abs().amax(dim=-1).clamp_(min=MIN_MAGNITUDE) / limit
    # Rounding may lead past the limit, where float8 has NaN and int8 wraps around.
    ratios = (x / scales.unsqueeze(-1)).clamp_(-limit, limit)
    if dtype == torch.int8:
        ratios.add_(0.5).floor_()
    return ratios.to(dtype), scales


def dequantize(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse: [..., D] and [...] to [..., D] of `dtype`."""
    return (stored.float() * scales.unsqueeze(-1)).to(dtype)
