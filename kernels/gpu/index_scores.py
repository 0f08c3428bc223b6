"""Scores of the indexer of sparse latent attention: one program per query and tile of keys.

All heads share the keys, so a tile of keys is loaded once for the product with all of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .latent_decode import row_stride
from .quantized_kv import as_stored, widen
from .tile_configs import INTERPRETED

# Keys per program.
BLOCK_KEYS = 64


# The width of block tables changes from step to step, and so does the alignment of parts of a step's tokens.
@triton.jit(
    do_not_specialize=["top_k", "stride_table", "stride_scores"],
    do_not_specialize_on_alignment=["weights_ptr", "rows_ptr", "lens_ptr"],
)
def _index_scores(
    q_ptr,  # [T, Hi, I]
    weights_ptr,  # [T, Hi] float32
    keys_ptr,  # [N, 1, 1, B, I], rows ROW_STRIDE apart
    scales_ptr,  # [N, 1, 1, B]
    tables_ptr,  # [S, M]
    rows_ptr,  # [T]
    lens_ptr,  # [T]
    scores_ptr,  # [T, M * B] float32
    num_heads,
    top_k,
    stride_q_token,
    stride_q_head,
    stride_weights,
    stride_table,
    stride_scores,
    DIM: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # grid: (T, tiles of keys)
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + token)
    start = tl.program_id(1) * BLOCK_K
    if (start >= length) | (length <= top_k):
        return
    offs_h = tl.arange(0, BLOCK_H)
    offs_i = tl.arange(0, BLOCK_I)
    positions = start + tl.arange(0, BLOCK_K)
    mask_h = offs_h < num_heads
    mask_i = offs_i < DIM
    live = positions < length
    q_ptrs = q_ptr + token * stride_q_token + offs_h[:, None] * stride_q_head + offs_i[None, :]
    q = tl.load(q_ptrs, mask=mask_h[:, None] & mask_i[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    table_ptr = tables_ptr + tl.load(rows_ptr + token) * stride_table
    blocks = tl.load(table_ptr + positions // CACHE_BLOCK, mask=live, other=0)
    slots = blocks.to(tl.int64) * CACHE_BLOCK + positions % CACHE_BLOCK
    key_ptrs = keys_ptr + slots[:, None] * ROW_STRIDE + offs_i[None, :]
    keys = tl.load(key_ptrs, mask=live[:, None] & mask_i[None, :], other=0.0)
    products = tl.dot(q, tl.trans(widen(keys, q.dtype)), input_precision="tf32x3")
    if scales_ptr is not None:
        products *= tl.load(scales_ptr + slots, mask=live, other=0.0)[None, :]
    weights = tl.load(weights_ptr + token * stride_weights + offs_h, mask=mask_h, other=0.0)
    scores = tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)
    tl.store(scores_ptr + token * stride_scores + positions, scores, mask=live)


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    lens: Tensor,
    top_k: int,
    scales: Tensor | None = None,
) -> Tensor:
    """See kernels.sparse_latent."""
    (num_tokens, num_heads, dim), block_size = q.shape, keys.shape[3]
    assert q.stride(2) == weights.stride(1) == block_tables.stride(1) == 1
    assert scales is None or scales.is_contiguous()
    width = block_tables.shape[1] * block_size
    scores = torch.empty((num_tokens, width), dtype=torch.float32, device=q.device)
    _index_scores[(num_tokens, triton.cdiv(width, BLOCK_KEYS))](
        q, weights, as_stored(keys), scales, block_tables, rows, lens, scores, num_heads, top_k,
        q.stride(0), q.stride(1), weights.stride(0), block_tables.stride(0), scores.stride(0),
        DIM=dim, ROW_STRIDE=row_stride(keys), CACHE_BLOCK=block_size,
        BLOCK_H=max(16, triton.next_power_of_2(num_heads)), BLOCK_I=max(16, triton.next_power_of_2(dim)),
        BLOCK_K=BLOCK_KEYS, UPCAST=INTERPRETED, num_warps=4,
    )  # fmt: skip
    return scores
