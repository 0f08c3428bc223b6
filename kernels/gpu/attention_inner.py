"""Inner loop of both attention kernels: an online softmax over paged keys and values, tile by tile.

Online softmax: Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018.
"""

import triton
import triton.language as tl

from ..attention_variant import AttentionVariant
from .quantized_kv import widen

# Factor of the scores, so that exp2 replaces exp.
LOG2_E = tl.constexpr(1.4426950408889634)


def score_arguments(scale: float, variant: AttentionVariant) -> tuple[float, float | None]:
    """Return the arguments `score_scale` and `cap_log2` of attend_keys."""
    log2_e = LOG2_E.value
    if not variant.soft_cap:
        return scale * log2_e, None
    return scale / variant.soft_cap * 2 * log2_e, variant.soft_cap * log2_e


@triton.jit
def first_visible(positions, window, chunk):
    """Return the first key that the query of each position attends to; both numbers may be None."""
    first = positions * 0
    if window is not None:
        first = tl.maximum(first, positions + 1 - window)
    if chunk is not None:
        first = tl.maximum(first, positions // chunk * chunk)
    return first


@triton.jit
def load_per_head(numbers_ptr, heads, mask):
    """Load the ALiBi slopes or sinks of some heads, for scores in base 2."""
    return tl.load(numbers_ptr + heads, mask=mask, other=0.0) * LOG2_E


@triton.jit
def attend_keys(
    q,
    out,
    top,
    total,
    head_ptr,
    scales_ptr,
    table_ptr,
    start,
    end,
    last_keys,
    score_scale,
    cap_log2,
    slopes,
    first_keys,
    stride_cache_block,
    stride_cache_kv,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend rows of queries to the keys and values of a sequence from `start` to `end`.

    Args:
        q: [R, D].
        out, top, total: [R, D], [R] and [R] float32: weighted sum of values, largest score so far (base 2),
            and sum of weights relative to that score.
        head_ptr: the KV head in the cache; table_ptr: the sequence's block ids.
        scales_ptr: the KV head in the scales of a quantized, contiguous cache, otherwise None.
        last_keys: [R], position of the last key visible to each row. Without MASKED all keys are visible to all rows,
            and `end - start` is a multiple of BLOCK_K.
        score_scale: scales products to scores in base 2; with a soft cap, to 2 * score / cap in base 2.
        cap_log2: the soft cap of scores in base 2, or None.
        slopes: [R], from load_per_head, or None without ALiBi.
        first_keys: [R], position of the first key visible to each row. None: all keys from `start` on are, and every
            row must see a key of the first tile.

    Returns:
        out, top and total.
    """
    offs_k = tl.arange(0, BLOCK_K)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    for tile_start in range(start, end, BLOCK_K):
        positions = tile_start + offs_k
        live = positions < end
        blocks = tl.load(table_ptr + positions // CACHE_BLOCK, mask=live, other=0)
        slots = blocks.to(tl.int64) * stride_cache_block + (positions % CACHE_BLOCK) * HEAD_DIM
        keys = tl.load(
            head_ptr + slots[None, :] + offs_d[:, None], mask=live[None, :] & mask_d[:, None], other=0.0
        )
        values = tl.load(
            head_ptr + stride_cache_kv + slots[:, None] + offs_d[None, :],
            mask=live[:, None] & mask_d[None, :],
            other=0.0,
        )
        # float32 is multiplied on tensor cores in three parts: IEEE products spilled 7 KB of registers per thread.
        scores = tl.dot(q, widen(keys, q.dtype), input_precision="tf32x3") * score_scale
        if scales_ptr is not None:
            key_scales = tl.load(scales_ptr + slots // HEAD_DIM, mask=live, other=0.0)
            scores *= key_scales[None, :]
        if cap_log2 is not None:
            # tanh(x) is 1 - 2 / (exp(2 x) + 1), also where exp overflows.
            scores = cap_log2 - 2 * cap_log2 / (tl.exp2(scores) + 1)
        if slopes is not None:
            scores += slopes[:, None] * (positions[None, :] - last_keys[:, None]).to(tl.float32)
        if MASKED:
            visible = (positions[None, :] <= last_keys[:, None]) & live[None, :]
            if first_keys is not None:
                visible &= positions[None, :] >= first_keys[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite_top = new_top
        if first_keys is not None:
            # For rows without a visible key so far, -inf - -inf would be NaN.
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - finite_top[:, None])
        decay = tl.exp2(top - finite_top)
        total = total * decay + tl.sum(weights, 1)
        out = out * decay[:, None]
        if scales_ptr is not None:
            value_scales = tl.load(scales_ptr + (stride_cache_kv + slots) // HEAD_DIM, mask=live, other=0.0)
            weights *= value_scales[None, :]
        out = tl.dot(weights.to(q.dtype), widen(values, q.dtype), out, input_precision="tf32x3")
        top = new_top
    return out, top, total
