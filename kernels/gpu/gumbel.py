"""kernels.gumbel for a tile of tokens: the same random bits, and noise that differs in rounding alone."""

import triton
import triton.language as tl


@triton.jit
def random_bits(key_low, key_high, token_ids):
    """[C] uint32 of [C] int32 token ids and the two halves of a row's key, int32."""
    x = token_ids.to(tl.uint32, bitcast=True) * 0x9E3779B9 + key_low.to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= key_high.to(tl.uint32, bitcast=True)
    x ^= x >> 15
    x *= 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def gumbel_noise(key_low, key_high, token_ids):
    """[C] float32, standard Gumbel numbers."""
    bits = random_bits(key_low, key_high, token_ids) & 0x7FFFFFFF
    v = (bits.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 2**-31
    v = tl.minimum(v, 1 - 2**-24)
    # The fast logarithm of a GPU has an absolute error: -log(1 - v) of a small v needs its series instead.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    exponential = tl.where(v < 1 / 32, series, -tl.log(1 - v))
    return -tl.log(exponential)
