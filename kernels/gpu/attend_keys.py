"""The inner loop of both attention kernels: paged keys and values, tile by tile, into an online softmax.

Online softmax: Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018.
"""

import triton
import triton.language as tl

# Scores are multiplied by it, so that exp2 can take the place of exp.
LOG2_E = 1.4426950408889634


@triton.jit
def attend_keys(
    q,
    out,
    top,
    total,
    head_ptr,
    table_ptr,
    start,
    end,
    last_keys,
    scale_log2,
    stride_cache_block,
    stride_cache_kv,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Adds the keys and values of a sequence from `start` to `end` to rows of queries.

    Args:
        q: [R, D].
        out, top, total: [R, D], [R] and [R] float32: the weighted sum of values, the largest score so far (base 2)
            and the sum of weights relative to it.
        head_ptr: the head's part of the cache; table_ptr: the sequence's block ids.
        last_keys: [R], the last key that each row sees; of the first tile that it meets it must see one. Without
            MASKED all rows see all keys, and `end - start` is a multiple of BLOCK_K.

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
        if UPCAST:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        # float32 is multiplied on tensor cores in three parts: exact products spilled 7 KB of registers a thread.
        scores = tl.dot(q, keys, input_precision="tf32x3") * scale_log2
        if MASKED:
            visible = (places[None, :] <= last_keys[:, None]) & live[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        out = out * decay[:, None]
        out = tl.dot(weights.to(values.dtype), values, out, input_precision="tf32x3")
        top = new_top
    return out, top, total
