"""Exact top_k, top_p and min_p without a sort: thresholds are found by pivots, two bits of a float a pass.

Floats are compared as integers of the same order. Probabilities are summed as integers, in units of 2^-36 of the
likeliest token's: integer sums do not depend on their order, so that neither tiles nor chance decide what is kept.
One program does a row, whose logits stay in the second-level cache between the passes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gumbel import gumbel_noise

# Logits a turn of the loop.
BLOCK_VOCAB = 2048


@triton.jit
def _ordered(values):
    """int32 with the order of float32; zeros of both signs are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(ordered):
    """The float32 of `_ordered`; -inf for the smallest number, which is none's."""
    value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(ordered == -(2**31), float("-inf"), value)


@triton.jit
def _weights(values, top):
    """int64 in proportion to probabilities; the likeliest token has 2^36."""
    return (tl.exp(values - top) * 68719476736.0).to(tl.int64)


@triton.jit
def _load_values(row_ptr, tile_start, vocab_len, temperature, BLOCK_V: tl.constexpr):
    offs_v = tile_start + tl.arange(0, BLOCK_V)
    logits = tl.load(row_ptr + offs_v, mask=offs_v < vocab_len, other=float("-inf"))
    return logits / temperature


@triton.jit
def _measure(values, top, IS_COUNT: tl.constexpr):
    if IS_COUNT:
        return (values > float("-inf")).to(tl.int64)
    else:
        return _weights(values, top)


@triton.jit
def _find_threshold(
    row_ptr, vocab_len, temperature, top, needed, IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr
):
    """The largest ordered number so that the tokens from it up weigh, or count, at least `needed`.

    The smallest one if all together do not.
    """
    digits = tl.arange(0, 4).to(tl.int64)
    threshold = tl.full([], -(2**31), tl.int64)
    for turn in range(16):
        pivots = threshold + (digits << (30 - 2 * turn))
        reached = tl.zeros([4], tl.int64)
        for tile_start in range(0, vocab_len, BLOCK_V):
            values = _load_values(row_ptr, tile_start, vocab_len, temperature, BLOCK_V)
            measure = _measure(values, top, IS_COUNT)
            above = _ordered(values)[:, None] >= pivots.to(tl.int32)[None, :]
            reached += tl.sum(tl.where(above, measure[:, None], 0), 0)
        # The higher a pivot, the less is above it; the first is the threshold of the turn before.
        threshold = tl.max(tl.where((reached >= needed) | (digits == 0), pivots, threshold), 0)
    return threshold.to(tl.int32)


@triton.jit
def _sum_above(
    row_ptr, vocab_len, temperature, top, threshold, IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr
):
    """How much the tokens above the threshold weigh, or count."""
    total = tl.zeros([], tl.int64)
    for tile_start in range(0, vocab_len, BLOCK_V):
        values = _load_values(row_ptr, tile_start, vocab_len, temperature, BLOCK_V)
        measure = _measure(values, top, IS_COUNT)
        total += tl.sum(tl.where(_ordered(values) > threshold, measure, 0), 0)
    return total


@triton.jit
def _draw_from_kept(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N]
    top_k_ptr,  # [N]
    top_p_ptr,  # [N]
    log_min_p_ptr,  # [N]
    keys_ptr,  # [N, 2]
    token_ids_ptr,  # [N]
    vocab_len,
    stride_logits,
    BLOCK_V: tl.constexpr,
):
    # grid: (N,)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    top = tl.full([], float("-inf"), tl.float32)
    for tile_start in range(0, vocab_len, BLOCK_V):
        values = _load_values(row_ptr, tile_start, vocab_len, temperature, BLOCK_V)
        top = tl.maximum(top, tl.max(values, 0))

    # Tokens above the threshold are kept, and of those at the threshold the first `num_ties`.
    threshold = tl.full([], -(2**31), tl.int32)
    num_ties = tl.full([], 2**31 - 1, tl.int64)
    if top_k < vocab_len:
        threshold = _find_threshold(row_ptr, vocab_len, temperature, top, top_k, True, BLOCK_V)
        num_ties = top_k - _sum_above(row_ptr, vocab_len, temperature, top, threshold, True, BLOCK_V)
    if top_p < 1:
        kept = _sum_above(row_ptr, vocab_len, temperature, top, threshold, False, BLOCK_V)
        if top_k < vocab_len:
            kept += num_ties * _weights(_value_of(threshold), top)
        needed = tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64)
        nucleus = _find_threshold(row_ptr, vocab_len, temperature, top, needed, False, BLOCK_V)
        missing = needed - _sum_above(row_ptr, vocab_len, temperature, top, nucleus, False, BLOCK_V)
        weight = tl.maximum(_weights(_value_of(nucleus), top), 1)
        ties_of_nucleus = (missing + weight - 1) // weight
        if nucleus == threshold:
            num_ties = tl.minimum(num_ties, ties_of_nucleus)
        elif nucleus > threshold:
            threshold = nucleus
            num_ties = ties_of_nucleus
    lowest = _ordered(top + tl.load(log_min_p_ptr + row))
    if lowest > threshold:
        threshold = lowest
        num_ties = tl.full([], 2**31 - 1, tl.int64)

    key_low, key_high = tl.load(keys_ptr + 2 * row), tl.load(keys_ptr + 2 * row + 1)
    best = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], 0, tl.int32)
    ties_before = tl.zeros([], tl.int64)
    for tile_start in range(0, vocab_len, BLOCK_V):
        values = _load_values(row_ptr, tile_start, vocab_len, temperature, BLOCK_V)
        ordered = _ordered(values)
        ties = (ordered == threshold).to(tl.int32)
        rank = ties_before + tl.cumsum(ties, 0) - ties
        keep = (ordered > threshold) | ((ties == 1) & (rank < num_ties))
        token_ids = tile_start + tl.arange(0, BLOCK_V)
        scores = tl.where(keep, values + gumbel_noise(key_low, key_high, token_ids), float("-inf"))
        best_here = tl.max(scores, 0)
        winner_here = tl.min(tl.where(scores == best_here, token_ids, 0x7FFFFFFF), 0)
        winner = tl.where(best_here > best, winner_here, winner)
        best = tl.maximum(best, best_here)
        ties_before += tl.sum(ties, 0)
    tl.store(token_ids_ptr + row, winner)


def draw_from_kept(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """See kernels.sampling."""
    num_rows, vocab_len = logits.shape
    assert logits.stride(1) == 1
    assert keys.is_contiguous()
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    _draw_from_kept[(num_rows,)](
        logits, temperature, top_k, top_p, min_p.log(), keys, token_ids, vocab_len, logits.stride(0),
        BLOCK_V=BLOCK_VOCAB, num_warps=8,
    )  # fmt: skip
    return token_ids
