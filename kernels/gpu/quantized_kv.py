"""Conversion of the numbers of a quantized cache (kernels.quantized_kv) from and to float.

GPUs that cannot convert float8_e4m3 read the cache as uint8 and convert the bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile_configs import INTERPRETED

# Lowest compute capability that converts float8_e4m3 in hardware.
CONVERTS_FP8 = (8, 9)
# Corrects the exponent: float32's bias is 127, float8_e4m3's is 7, and 127 - 7 is 120.
_TO_FP8 = tl.constexpr(2.0**-120)


def as_stored(kv_cache: Tensor) -> Tensor:
    """Return the cache as kernels read it: float8 as uint8 bits if the GPU cannot convert it."""
    if kv_cache.dtype != torch.float8_e4m3fn:
        return kv_cache
    converts = not INTERPRETED and torch.cuda.get_device_capability(kv_cache.device) >= CONVERTS_FP8
    return kv_cache if converts else kv_cache.view(torch.uint8)


@triton.jit
def widen(stored, dtype: tl.constexpr):
    """Convert numbers of the cache to another type; exact from 8 bits to any 16-bit type."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        halves = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
        # The exponent bias changes from 7 to 15.
        return (halves * 256.0).to(dtype)
    else:
        return stored.to(dtype)


@triton.jit
def narrow(ratios, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """Round float32 numbers to a cache's type, clamped to its limit; uint8 is float8 as bits."""
    clamped = tl.minimum(tl.maximum(ratios, -LIMIT), LIMIT)
    if dtype == tl.uint8:
        # float32 is then subnormal where float8 is. Rounds off 20 bits, ties to even.
        bits = (tl.abs(clamped) * _TO_FP8).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        return tl.where(clamped < 0, rounded | 0x80, rounded).to(tl.uint8)
    elif dtype == tl.int8:
        return tl.floor(clamped + 0.5).to(tl.int8)
    else:
        return clamped.to(dtype)
