"""Numbers of a quantised cache, to and from registers; what they mean is said in kernels.quantized_kv.

float8_e4m3 is taken apart bit by bit where the GPU cannot convert it: its cache comes as uint8 there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tile_configs import INTERPRETED

# From this compute capability on the hardware converts float8_e4m3.
CONVERTS_FP8 = (8, 9)
# 2**-120: what float32's exponent, counted from 127, has more than one that is counted from 7.
_TO_FP8 = tl.constexpr(2.0**-120)


def as_stored(kv_cache: Tensor) -> Tensor:
    """The cache as kernels read it: float8 as bits, where they cannot be converted otherwise."""
    if kv_cache.dtype != torch.float8_e4m3fn:
        return kv_cache
    converts = not INTERPRETED and torch.cuda.get_device_capability(kv_cache.device) >= CONVERTS_FP8
    return kv_cache if converts else kv_cache.view(torch.uint8)


@triton.jit
def widen(stored, dtype: tl.constexpr):
    """Numbers of the cache in another type; exact for quantised ones in any of 16 bits."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        halves = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
        # The exponent was counted from 7 and is now counted from 15.
        return (halves * 256.0).to(dtype)
    else:
        return stored.to(dtype)


@triton.jit
def narrow(ratios, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """float32 numbers, rounded and clamped to the limits of a cache's type; uint8 is float8 as bits."""
    clamped = tl.minimum(tl.maximum(ratios, -LIMIT), LIMIT)
    if dtype == tl.uint8:
        # float32 is denormal then where float8 is. 20 bits are rounded off, ties to even.
        bits = (tl.abs(clamped) * _TO_FP8).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        return tl.where(clamped < 0, rounded | 0x80, rounded).to(tl.uint8)
    elif dtype == tl.int8:
        return tl.floor(clamped + 0.5).to(tl.int8)
    else:
        return clamped.to(dtype)
