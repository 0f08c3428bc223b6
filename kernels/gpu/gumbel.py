"""Keys and Gumbel noise of kernels.gumbel: the same random bits; the noise differs in rounding only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_LEN = 128


@triton.jit(do_not_specialize=["num_rows"])
def _random_keys(
    seeds_ptr,  # [N]
    positions_ptr,  # [N]
    keys_ptr,  # [N] int64, both halves
    num_rows,
    BLOCK_N: tl.constexpr,
):
    # grid: (tiles of N,)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < num_rows
    seeds = tl.load(seeds_ptr + offs_n, mask=mask, other=0).to(tl.uint64, bitcast=True)
    steps = tl.load(positions_ptr + offs_n, mask=mask, other=0).to(tl.uint64, bitcast=True) + 1
    x = seeds + steps * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x ^= x >> 31
    tl.store(keys_ptr + offs_n, x.to(tl.int64, bitcast=True), mask=mask)


def random_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """See kernels.gumbel."""
    num_rows = len(seeds)
    assert seeds.is_contiguous()
    assert positions.is_contiguous()
    keys = torch.empty_like(seeds)
    if num_rows:
        grid = (triton.cdiv(num_rows, BLOCK_LEN),)
        _random_keys[grid](seeds, positions, keys, num_rows, BLOCK_N=BLOCK_LEN)
    return keys.view(torch.int32).view(-1, 2)


@triton.jit
def random_bits(key_low, key_high, token_ids):
    """Return uint32 bits for int32 token ids and the two int32 halves of a row's key."""
    x = token_ids.to(tl.uint32, bitcast=True) * 0x9E3779B9 + key_low.to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= key_high.to(tl.uint32, bitcast=True)
    x ^= x >> 15
    x *= 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def gumbel_noise(key_low, key_high, token_ids):
    """Return standard Gumbel noise, float32."""
    bits = random_bits(key_low, key_high, token_ids) & 0x7FFFFFFF
    v = (bits.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 2**-31
    v = tl.minimum(v, 1 - 2**-24)
    # The fast logarithm of a GPU has an absolute error, so -log(1 - v) of a small v is computed as its series.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    exponential = tl.where(v < 1 / 32, series, -tl.log(1 - v))
    return -tl.log(exponential)
