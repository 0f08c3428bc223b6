"""Absorbed latent attention of one new token per sequence, with tokens split among programs.

Each program computes one work item (see kernels.decode_splits) of some heads. All heads read the same latents, which
are keys and values at once, so a tile of latents is loaded once for both products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_splits import DecodeSplits, split_decodes
from ..workspace import float_workspace
from .attention_inner import LOG2_E
from .paged_decode import MERGED_ITEMS, merge_items
from .quantized_kv import as_stored, widen
from .tile_configs import INTERPRETED, LATENT_DECODE_TILES, find_latent_tile

# Numbers of a query in float32 that are multiplied at a time. A whole one is 2 KB per head, which every warp of a
# product holds: 2 KB per thread spilled.
FLOAT32_BLOCK_Q = 64


# The batch size and the width of its block tables change from step to step.
@triton.jit(do_not_specialize=["num_seqs", "stride_table"])
def _attend_latents(
    q_ptr,  # [S, Hq, D]
    cache_ptr,  # [N, 1, 1, B, D], rows ROW_STRIDE apart
    scales_ptr,  # [N, 1, 1, B]
    tables_ptr,  # [S, M]
    seq_lens_ptr,  # [S]
    item_len_ptr,  # [1]
    item_seqs_ptr,  # [I]
    first_items_ptr,  # [S + 1]
    out_ptr,  # [S, Hq, C]
    partial_ptr,  # [I, Hq, C] float32
    log_sums_ptr,  # [I, Hq] float32
    score_scale,
    num_heads,
    num_seqs,
    stride_q_seq,
    stride_q_head,
    stride_table,
    LATENT_DIM: tl.constexpr,
    SHARED_DIM: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # grid: (I, tiles of Hq)
    item = tl.program_id(0)
    seq = tl.load(item_seqs_ptr + item).to(tl.int64)
    if seq >= num_seqs:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    first_item = tl.load(first_items_ptr + seq)
    end_item = tl.load(first_items_ptr + seq + 1)
    item_len = tl.load(item_len_ptr)
    start = (item - first_item) * item_len
    end = tl.minimum(start + item_len, seq_len)

    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_c = tl.arange(0, BLOCK_C)
    offs_r = tl.arange(0, BLOCK_R)
    offs_k = tl.arange(0, BLOCK_K)
    mask_h = offs_h < num_heads
    mask_c = offs_c < LATENT_DIM
    mask_r = offs_r < SHARED_DIM
    q_ptrs = q_ptr + seq * stride_q_seq + offs_h[:, None] * stride_q_head
    q_shared = tl.load(
        q_ptrs + LATENT_DIM + offs_r[None, :], mask=mask_h[:, None] & mask_r[None, :], other=0.0
    )
    if UPCAST:
        q_shared = q_shared.to(tl.float32)
    if BLOCK_Q == BLOCK_C:
        q = tl.load(q_ptrs + offs_c[None, :], mask=mask_h[:, None] & mask_c[None, :], other=0.0)
        q = q.to(q_shared.dtype)

    table_ptr = tables_ptr + seq * stride_table
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    out = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for tile_start in range(start, end, BLOCK_K):
        positions = tile_start + offs_k
        live = positions < end
        blocks = tl.load(table_ptr + positions // CACHE_BLOCK, mask=live, other=0)
        slots = blocks.to(tl.int64) * CACHE_BLOCK + positions % CACHE_BLOCK
        row_ptrs = cache_ptr + slots[:, None] * ROW_STRIDE
        latents = tl.load(row_ptrs + offs_c[None, :], mask=live[:, None] & mask_c[None, :], other=0.0)
        shared = tl.load(
            row_ptrs + LATENT_DIM + offs_r[None, :], mask=live[:, None] & mask_r[None, :], other=0.0
        )
        latents = widen(latents, q_shared.dtype)
        if BLOCK_Q == BLOCK_C:
            scores = tl.dot(q, tl.trans(latents), input_precision="tf32x3")
        else:
            scores = tl.zeros([BLOCK_H, BLOCK_K], tl.float32)
            for first in range(0, LATENT_DIM, BLOCK_Q):
                offs_q = first + tl.arange(0, BLOCK_Q)
                mask_q = offs_q < LATENT_DIM
                q = tl.load(q_ptrs + offs_q[None, :], mask=mask_h[:, None] & mask_q[None, :], other=0.0)
                part = tl.load(row_ptrs + offs_q[None, :], mask=live[:, None] & mask_q[None, :], other=0.0)
                scores = tl.dot(q, tl.trans(widen(part, q_shared.dtype)), scores, input_precision="tf32x3")
        scores = tl.dot(q_shared, tl.trans(widen(shared, q_shared.dtype)), scores, input_precision="tf32x3")
        scores *= score_scale
        if scales_ptr is not None:
            row_scales = tl.load(scales_ptr + slots, mask=live, other=0.0)
            scores *= row_scales[None, :]
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        out = out * decay[:, None]
        if scales_ptr is not None:
            weights *= row_scales[None, :]
        out = tl.dot(weights.to(q_shared.dtype), latents, out, input_precision="tf32x3")
        top = new_top
    out = out / total[:, None]
    mask = mask_h[:, None] & mask_c[None, :]
    if end_item - first_item == 1:
        rows = seq * num_heads + offs_h
        tl.store(out_ptr + rows[:, None] * LATENT_DIM + offs_c[None, :], out, mask=mask)
    else:
        rows = item.to(tl.int64) * num_heads + offs_h
        tl.store(partial_ptr + rows[:, None] * LATENT_DIM + offs_c[None, :], out, mask=mask)
        tl.store(log_sums_ptr + rows, top + tl.log2(total), mask=mask_h)


def row_stride(latents: Tensor) -> int:
    """Return the numbers from one token of a block to the next: those of a whole row, of which this is a part."""
    block_size = latents.shape[3]
    stride = latents.stride(0) // block_size
    assert latents.stride(4) == 1
    assert block_size == 1 or latents.stride(3) == stride
    return stride


def latent_decode_attention(
    q: Tensor,
    latents: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    value_dim: int,
    splits: DecodeSplits | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """See kernels.latent_attention; the output of padding rows is 0."""
    num_seqs, num_heads, dim = q.shape
    block_size = latents.shape[3]
    assert q.stride(2) == 1
    assert latents.shape[1:3] == (1, 1)
    assert scales is None or scales.is_contiguous()
    assert block_tables.stride(1) == 1
    if splits is None:
        splits = split_decodes(seq_lens, block_tables.shape[1] * block_size)
    assert splits.runs is None
    num_items = splits.item_seqs.shape[0]
    tile = find_latent_tile(LATENT_DECODE_TILES, value_dim, q, latents)
    out = torch.empty((num_seqs, num_heads, value_dim), dtype=q.dtype, device=q.device)
    num_rows = num_items * num_heads
    partial = float_workspace(num_rows * (value_dim + 1), q.device)
    log_sums = partial[num_rows * value_dim :]
    block_c = max(16, triton.next_power_of_2(value_dim))
    block_q = min(block_c, FLOAT32_BLOCK_Q) if q.dtype == torch.float32 else block_c
    _attend_latents[(num_items, triton.cdiv(num_heads, tile.num_rows))](
        q, as_stored(latents), scales, block_tables, seq_lens, splits.item_len, splits.item_seqs,
        splits.first_items, out, partial, log_sums,
        scale * LOG2_E.value, num_heads, num_seqs, q.stride(0), q.stride(1), block_tables.stride(0),
        LATENT_DIM=value_dim, SHARED_DIM=dim - value_dim, ROW_STRIDE=row_stride(latents),
        CACHE_BLOCK=block_size, BLOCK_H=tile.num_rows, BLOCK_K=tile.num_keys, BLOCK_C=block_c, BLOCK_Q=block_q,
        BLOCK_R=max(16, triton.next_power_of_2(dim - value_dim)), UPCAST=INTERPRETED,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    merge_items[(num_seqs, num_heads)](
        partial, log_sums, seq_lens, splits.item_len, splits.first_items, out, None, None,
        HEAD_DIM=value_dim, BLOCK_I=MERGED_ITEMS, BLOCK_D=triton.next_power_of_2(value_dim),
    )  # fmt: skip
    return out
