"""Exact thresholds of whole rows by radix search with histograms: three passes over a row, whatever its values.

Used for rows that keep more tokens than there is room for candidates (kernels.gpu.topk_candidates). One program
processes a row, whose logits stay in the L2 cache between passes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logits import load_values
from .topk_candidates import NO_VALUE, ordered_of, weights_of

# Logits per iteration.
BLOCK_VOCAB = 2048
# A pass finds the next 11 bits of a value, the last one 10.
HISTOGRAM_LEN = 1 << 11


def make_histograms(num_rows: int, device: torch.device) -> Tensor:
    """Return uninitialized memory for the histogram of each row, [M, HISTOGRAM_LEN] int64."""
    return torch.empty((num_rows, HISTOGRAM_LEN), dtype=torch.int64, device=device)


@triton.jit
def _load_measured(source, member, row, tile_start, top, IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr):
    """Load a tile's ordered values and their measures: 1 each, or their weights."""
    columns = tile_start + tl.arange(0, BLOCK_V)
    values = load_values(source, member, row, tile_start, columns, BLOCK_V)
    if IS_COUNT:
        return ordered_of(values), (values > float("-inf")).to(tl.int64)
    else:
        return ordered_of(values), weights_of(values, top)


@triton.jit
def _fill_histogram(
    source, member, row, top, histogram_ptr, prefix, SHIFT: tl.constexpr, BITS: tl.constexpr,
    IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr, LEN: tl.constexpr,
):  # fmt: skip
    """Add up the measures of the row's values that start with `prefix`, by their next digit; return the sums."""
    offs_h = tl.arange(0, LEN)
    tl.store(histogram_ptr + offs_h, tl.zeros([LEN], tl.int64))
    tl.debug_barrier()
    for tile_start in range(0, source.vocab_len, BLOCK_V):
        ordered, measures = _load_measured(source, member, row, tile_start, top, IS_COUNT, BLOCK_V)
        # Of the same order, and not negative.
        numbers = ordered.to(tl.int64) - NO_VALUE
        digits = (numbers >> SHIFT) & ((1 << BITS) - 1)
        matches = (numbers >> (SHIFT + BITS)) == prefix
        tl.atomic_add(histogram_ptr + digits, measures, mask=matches & (measures > 0), sem="relaxed")
    tl.debug_barrier()
    # The sums are in the L2 cache, where atomic operations are executed.
    sums = tl.load(histogram_ptr + offs_h, cache_modifier=".cg")
    tl.debug_barrier()  # the next pass overwrites them
    return sums


@triton.jit
def _find_digit(
    source, member, row, top, histogram_ptr, needed, prefix, above, SHIFT: tl.constexpr, BITS: tl.constexpr,
    IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr, LEN: tl.constexpr,
):  # fmt: skip
    """Return the prefix with the next digit of the threshold, and the measure of the values above that prefix."""
    sums = _fill_histogram(
        source, member, row, top, histogram_ptr, prefix, SHIFT, BITS, IS_COUNT, BLOCK_V, LEN
    )
    offs_h = tl.arange(0, LEN)
    from_digit = above + tl.sum(sums, 0) - tl.cumsum(sums, 0) + sums
    # Without a digit that reaches `needed`, all tokens are less, and the search ends at the lowest value.
    digit = tl.max(tl.where(from_digit >= needed, offs_h, 0), 0)
    above = tl.sum(tl.where(offs_h == digit, from_digit - sums, 0), 0)
    return (prefix << BITS) | digit, above


@triton.jit
def find_threshold(
    source, member, row, top, needed, histograms_ptr, IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr,
    LEN: tl.constexpr,
):  # fmt: skip
    """Find the largest ordered value such that the tokens from it up weigh, or count, at least `needed`.

    Args:
        histograms_ptr: [M, LEN] int64, from make_histograms.

    Returns:
        the value, NO_VALUE if all tokens together are less; and what the tokens above it weigh, or count.
    """
    histogram_ptr = histograms_ptr + member * LEN
    prefix, above = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    prefix, above = _find_digit(
        source, member, row, top, histogram_ptr, needed, prefix, above, 21, 11, IS_COUNT, BLOCK_V, LEN
    )
    prefix, above = _find_digit(
        source, member, row, top, histogram_ptr, needed, prefix, above, 10, 11, IS_COUNT, BLOCK_V, LEN
    )
    prefix, above = _find_digit(
        source, member, row, top, histogram_ptr, needed, prefix, above, 0, 10, IS_COUNT, BLOCK_V, LEN
    )
    return (prefix + NO_VALUE).to(tl.int32), above


@triton.jit
def weigh_above(source, member, row, top, threshold, BLOCK_V: tl.constexpr):
    """Return the total weight of the tokens above the threshold."""
    total = tl.zeros([], tl.int64)
    for tile_start in range(0, source.vocab_len, BLOCK_V):
        ordered, measures = _load_measured(source, member, row, tile_start, top, False, BLOCK_V)
        total += tl.sum(tl.where(ordered > threshold, measures, 0), 0)
    return total


@triton.jit
def keep_tile(ordered, threshold, num_ties, ties_before):
    """Select the tokens of a tile above the threshold, and the first `num_ties` tokens of the row at the threshold.

    Returns the mask [C] bool, and the number of ties up to the tile's end.
    """
    ties = (ordered == threshold).to(tl.int32)
    tie_ranks = ties_before + tl.cumsum(ties, 0) - ties
    keep = (ordered > threshold) | ((ties == 1) & (tie_ranks < num_ties))
    return keep, ties_before + tl.sum(ties, 0)
