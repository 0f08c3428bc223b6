"""Exact thresholds of whole rows by pivots, two bits of a float a pass: for rows with more tokens to keep than there
is room for candidates (kernels.gpu.topk_candidates).

One program does a row, whose logits stay in the second-level cache between the passes.
"""

import triton
import triton.language as tl

from .logits import load_values
from .topk_candidates import NO_VALUE, ordered_of, weights_of

# Logits a turn of the loop.
BLOCK_VOCAB = 1024


@triton.jit
def _load_measured(source, member, row, tile_start, top, IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr):
    """Ordered values of a tile, and what each adds: 1, or its weight."""
    columns = tile_start + tl.arange(0, BLOCK_V)
    values = load_values(source, member, row, tile_start, columns, BLOCK_V)
    if IS_COUNT:
        return ordered_of(values), (values > float("-inf")).to(tl.int64)
    else:
        return ordered_of(values), weights_of(values, top)


@triton.jit
def find_threshold(source, member, row, top, needed, IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr):
    """The largest ordered value so that the tokens from it up weigh, or count, at least `needed`.

    NO_VALUE if all together do not.
    """
    digits = tl.arange(0, 4).to(tl.int64)
    threshold = tl.full([], NO_VALUE, tl.int64)
    for turn in range(16):
        pivots = threshold + (digits << (30 - 2 * turn))
        reached = tl.zeros([4], tl.int64)
        for tile_start in range(0, source.vocab_len, BLOCK_V):
            ordered, measures = _load_measured(source, member, row, tile_start, top, IS_COUNT, BLOCK_V)
            above = ordered[:, None] >= pivots.to(tl.int32)[None, :]
            reached += tl.sum(tl.where(above, measures[:, None], 0), 0)
        # The higher a pivot, the less is above it; the first is the threshold of the turn before.
        threshold = tl.max(tl.where((reached >= needed) | (digits == 0), pivots, threshold), 0)
    return threshold.to(tl.int32)


@triton.jit
def sum_above(source, member, row, top, threshold, IS_COUNT: tl.constexpr, BLOCK_V: tl.constexpr):
    """How much the tokens above the threshold weigh, or count."""
    total = tl.zeros([], tl.int64)
    for tile_start in range(0, source.vocab_len, BLOCK_V):
        ordered, measures = _load_measured(source, member, row, tile_start, top, IS_COUNT, BLOCK_V)
        total += tl.sum(tl.where(ordered > threshold, measures, 0), 0)
    return total


@triton.jit
def keep_tile(ordered, threshold, num_ties, ties_before):
    """What a tile keeps, [C] bool: all above the threshold, and of those at it the first `num_ties` of the row.

    Returns with it how many ties there are up to the tile's end.
    """
    ties = (ordered == threshold).to(tl.int32)
    places = ties_before + tl.cumsum(ties, 0) - ties
    keep = (ordered > threshold) | ((ties == 1) & (places < num_ties))
    return keep, ties_before + tl.sum(ties, 0)
