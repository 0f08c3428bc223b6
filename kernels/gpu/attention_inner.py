"""The inner loop of both attention kernels: paged keys and values, tile by tile, into an online softmax.

Online softmax: Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018.
"""

import triton
import triton.language as tl

from ..attention_variant import AttentionVariant
from .quantized_kv import widen

# Scores are multiplied by it, so that exp2 can take the place of exp.
LOG2_E = tl.constexpr(1.4426950408889634)


def score_arguments(scale: float, variant: AttentionVariant) -> tuple[float, float | None, int | None]:
    """`score_scale`, `cap_log2` and `window` of attend_keys."""
    log2_e, window = LOG2_E.value, variant.window or None
    if not variant.soft_cap:
        return scale * log2_e, None, window
    return scale / variant.soft_cap * 2 * log2_e, variant.soft_cap * log2_e, window


@triton.jit
def load_slopes(slopes_ptr, heads, mask):
    """ALiBi's slopes of some heads, for scores in base 2; None without ALiBi."""
    if slopes_ptr is None:
        return None
    else:
        return tl.load(slopes_ptr + heads, mask=mask, other=0.0) * LOG2_E


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
    window,
    stride_cache_block,
    stride_cache_kv,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds the keys and values of a sequence from `start` to `end` to rows of queries.

    Args:
        q: [R, D].
        out, top, total: [R, D], [R] and [R] float32: the weighted sum of values, the largest score so far (base 2)
            and the sum of weights relative to it.
        head_ptr: the head's part of the cache; table_ptr: the sequence's block ids.
        scales_ptr: the head's part of the scales of a quantised, contiguous cache, otherwise None.
        last_keys: [R], the last key that each row sees. Without MASKED all rows see all keys, and `end - start` is a
            multiple of BLOCK_K.
        score_scale: makes products scores in base 2; with a soft cap twice those, as shares of the cap.
        cap_log2: the soft cap of scores in base 2, or None.
        slopes: [R], as load_slopes returns them.
        window: how many keys each row sees at most, or None: then each row must see one of the first tile's.

    Returns:
        out, top and total.
    """
    offs_k = tl.arange(0, BLOCK_K)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    for tile_start in range(start, end, BLOCK_K):
        places = tile_start + offs_k
        live = places < end
        blocks = tl.load(table_ptr + places // CACHE_BLOCK, mask=live, other=0)
        slots = blocks.to(tl.int64) * stride_cache_block + (places % CACHE_BLOCK) * HEAD_DIM
        keys = tl.load(
            head_ptr + slots[None, :] + offs_d[:, None], mask=live[None, :] & mask_d[:, None], other=0.0
        )
        values = tl.load(
            head_ptr + stride_cache_kv + slots[:, None] + offs_d[None, :],
            mask=live[:, None] & mask_d[None, :],
            other=0.0,
        )
        # float32 is multiplied on tensor cores in three parts: exact products spilled 7 KB of registers a thread.
        scores = tl.dot(q, widen(keys, q.dtype), input_precision="tf32x3") * score_scale
        if scales_ptr is not None:
            key_scales = tl.load(scales_ptr + slots // HEAD_DIM, mask=live, other=0.0)
            scores *= key_scales[None, :]
        if cap_log2 is not None:
            # tanh(x) is 1 - 2 / (exp(2 x) + 1), also where exp overflows.
            scores = cap_log2 - 2 * cap_log2 / (tl.exp2(scores) + 1)
        if slopes is not None:
            scores += slopes[:, None] * (places[None, :] - last_keys[:, None]).to(tl.float32)
        if MASKED:
            visible = (places[None, :] <= last_keys[:, None]) & live[None, :]
            if window is not None:
                visible &= places[None, :] > last_keys[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite_top = new_top
        if window is not None:
            # Rows that have seen no key yet: -inf - -inf would be NaN.
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
