"""Exact thresholds of whole rows by radix search, two bits per pass.

Used for rows that keep more tokens than there is room for candidates (kernels.gpu.topk_candidates). One program
processes a row, whose logits stay in the L2 cache between passes.
"""

import triton
import triton.language as tl

from .logits import load_values
from .topk_candidates import NO_VALUE, ordered_of, weights_of

# Logits per iteration.
BLOCK_VOCAB = 1024


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
def find_threshold(source, member, row, top, needed, IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the largest ordered value such that the tokens from it up weigh, or count, at least `needed`.

    Returns NO_VALUE if all tokens together are less.
    """
    digits = tl.arange(0, 4).to(tl.int64)
    threshold = tl.full([], NO_VALUE, tl.int64)
    for step in range(16):
        thresholds = threshold + (digits << (30 - 2 * step))
        reached = tl.zeros([4], tl.int64)
        for tile_start in range(0, source.vocab_len, BLOCK_V):
            ordered, measures = _load_measured(source, member, row, tile_start, top, IS_COUNT, BLOCK_V)
            above = ordered[:, None] >= thresholds.to(tl.int32)[None, :]
            reached += tl.sum(tl.where(above, measures[:, None], 0), 0)
        # The higher the threshold, the less is above it. The first one is the threshold of the previous step.
        threshold = tl.max(tl.where((reached >= needed) | (digits == 0), thresholds, threshold), 0)
    return threshold.to(tl.int32)


@triton.jit
def sum_above(source, member, row, top, threshold, IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the total weight, or the count, of the tokens above the threshold."""
    total = tl.zeros([], tl.int64)
    for tile_start in range(0, source.vocab_len, BLOCK_V):
        ordered, measures = _load_measured(source, member, row, tile_start, top, IS_COUNT, BLOCK_V)
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
