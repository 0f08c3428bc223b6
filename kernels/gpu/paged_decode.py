"""Attention of the newest tokens of sequences over the paged cache, with keys split among programs.

Each program computes one work item (see kernels.decode_splits) of one KV head. All query heads of the group are rows
of one tile, and so are the tokens of a sequence whose drafts are verified, so that keys and values are read once. A
second kernel merges the items of tokens that have several.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention_variant import PLAIN, AttentionVariant
from ..decode_splits import DecodeSplits, split_decodes
from ..workspace import float_workspace
from .attention_inner import attend_keys, first_visible, load_per_head, score_arguments
from .quantized_kv import as_stored
from .tile_configs import DECODE_TILES, INTERPRETED, find_run_tile

# Items merged per iteration.
MERGED_ITEMS = 16


@triton.jit
def _find_items(first_items_ptr, item_len_ptr, seq, seq_len, window, chunk):
    """Return a sequence's first item, its first item with a visible key, and the end of its items."""
    first_item = tl.load(first_items_ptr + seq)
    end_item = tl.load(first_items_ptr + seq + 1)
    if window is None and chunk is None:
        return first_item, first_item, end_item
    else:
        skipped = first_visible(seq_len - 1, window, chunk) // tl.load(item_len_ptr)
        return first_item, first_item + skipped, end_item


# The batch size and the width of its block tables change from step to step.
@triton.jit(do_not_specialize=["num_seqs", "stride_table"])
def _attend_items(
    q_ptr,  # [S, Hq, D]
    cache_ptr,  # [N, 2, Hkv, B, D]
    scales_ptr,  # [N, 2, Hkv, B]
    tables_ptr,  # [S, M]
    seq_lens_ptr,  # [S]
    item_len_ptr,  # [1]
    item_seqs_ptr,  # [I]
    first_items_ptr,  # [S + 1]
    run_ends_ptr,  # [S]
    first_parts_ptr,  # [S + 1]
    out_ptr,  # [S, Hq, D]
    partial_ptr,  # [P, Hq, D] float32
    log_sums_ptr,  # [P, Hq] float32
    slopes_ptr,  # [Hq]
    sinks_ptr,  # [Hq]
    score_scale,
    cap_log2,
    window,
    chunk,
    num_seqs,
    stride_q_seq,
    stride_q_head,
    stride_cache_block,
    stride_cache_kv,
    stride_cache_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # grid: (I, Hkv, tiles of the rows of a run)
    TILE_QUERIES: tl.constexpr = BLOCK_R // GROUP
    item, kv_head, first_query = tl.program_id(0), tl.program_id(1), tl.program_id(2) * TILE_QUERIES
    num_heads = tl.num_programs(1) * GROUP
    seq = tl.load(item_seqs_ptr + item).to(tl.int64)
    if seq >= num_seqs:
        return
    last_query = 0
    if run_ends_ptr is not None:
        last_query = tl.load(run_ends_ptr + seq) - 1 - seq
        if first_query > last_query:
            return
        last_query = tl.minimum(last_query, first_query + TILE_QUERIES - 1)
    item_len = tl.load(item_len_ptr)
    index = item - tl.load(first_items_ptr + seq)
    first_len = tl.load(seq_lens_ptr + seq + first_query)
    end = tl.minimum((index + 1) * item_len, tl.load(seq_lens_ptr + seq + last_query))
    start = tl.maximum(index * item_len, first_visible(first_len - 1, window, chunk))
    if start >= end:
        return

    offs_r = tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + offs_r % GROUP
    # Rows of the tile beyond those of the run repeat its last one, and are not stored.
    queries = tl.minimum(first_query + offs_r // GROUP, last_query)
    mask_r = (offs_r < TILE_QUERIES * GROUP) & (first_query + offs_r // GROUP <= last_query)
    seqs = seq + queries
    mask_d = offs_d < HEAD_DIM
    mask_q = mask_r[:, None] & mask_d[None, :]
    q_rows = seqs * stride_q_seq + heads * stride_q_head
    q = tl.load(q_ptr + q_rows[:, None] + offs_d[None, :], mask=mask_q, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    head_ptr = cache_ptr + kv_head * stride_cache_head
    if scales_ptr is not None:
        scales_ptr += kv_head * (stride_cache_head // HEAD_DIM)
    slopes = None
    if slopes_ptr is not None:
        slopes = load_per_head(slopes_ptr, heads, mask_r)
    lens = tl.load(seq_lens_ptr + seqs)
    visible_item = first_visible(lens - 1, window, chunk) // item_len
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    if sinks_ptr is not None:
        # A key whose value is 0, in one of the items.
        top = tl.where(index == visible_item, load_per_head(sinks_ptr, heads, mask_r), top)
        total = tl.where(index == visible_item, 1.0, total)
    out = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    # A window or chunk of a single token needs no mask: its visible keys begin at `start`.
    first_keys = None
    if run_ends_ptr is not None:
        first_keys = first_visible(lens - 1, window, chunk)
    out, top, total = attend_keys(
        q, out, top, total, head_ptr, scales_ptr, tables_ptr + seq * stride_table, start, end, lens - 1,
        score_scale, cap_log2, slopes, first_keys, stride_cache_block, stride_cache_kv, True,
        HEAD_DIM, CACHE_BLOCK, BLOCK_K, BLOCK_D,
    )  # fmt: skip
    # Of a run some tokens may have no key in this item, and some may have this item alone.
    total = tl.where(total > 0, total, 1.0)
    out = out / total[:, None]
    end_item = tl.cdiv(lens, item_len)
    mask_r &= (index >= visible_item) & (index < end_item)
    is_whole = end_item - visible_item == 1
    out_rows = seqs * num_heads + heads
    mask_out = (mask_r & is_whole)[:, None] & mask_d[None, :]
    tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + offs_d[None, :], out, mask=mask_out)
    parts = (tl.load(first_parts_ptr + seqs) + index).to(tl.int64)
    part_rows = parts * num_heads + heads
    mask_part = mask_r & (end_item - visible_item > 1)
    mask_parts = mask_part[:, None] & mask_d[None, :]
    tl.store(partial_ptr + part_rows[:, None] * HEAD_DIM + offs_d[None, :], out, mask=mask_parts)
    tl.store(log_sums_ptr + part_rows, top + tl.log2(total), mask=mask_part)


@triton.jit
def merge_items(
    partial_ptr,  # [I, Hq, D] float32
    log_sums_ptr,  # [I, Hq] float32, base 2
    seq_lens_ptr,  # [S]
    item_len_ptr,  # [1]
    first_items_ptr,  # [S + 1]
    out_ptr,  # [S, Hq, D]
    window,
    chunk,
    HEAD_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: (S, Hq)
    # Also merges the items of latent attention, whose HEAD_DIM is the length of a latent.
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    _, visible_item, end_item = _find_items(first_items_ptr, item_len_ptr, seq, seq_len, window, chunk)
    if end_item - visible_item == 1:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    out = tl.zeros([BLOCK_D], tl.float32)
    for tile_start in range(visible_item, end_item, BLOCK_I):
        items = tile_start + tl.arange(0, BLOCK_I)
        live = items < end_item
        rows = items.to(tl.int64) * num_heads + head
        log_sums = tl.load(log_sums_ptr + rows, mask=live, other=float("-inf"))
        partial = tl.load(
            partial_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :],
            mask=live[:, None] & mask_d[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(log_sums, 0))
        weights = tl.exp2(log_sums - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 0)
        out = out * decay + tl.sum(partial * weights[:, None], 0)
        top = new_top
    out = out / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (seq * num_heads + head) * HEAD_DIM + offs_d, out, mask=mask_d)


def paged_decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    splits: DecodeSplits | None = None,
    variant: AttentionVariant = PLAIN,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """See kernels.paged_attention; the output of padding rows is 0."""
    num_seqs, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    assert q.stride(2) == 1
    assert kv_cache.stride()[3:] == (head_dim, 1)
    assert num_heads % num_kv_heads == 0
    assert block_tables.stride(1) == 1
    assert kv_scales is None or (kv_scales.is_contiguous() and kv_cache.is_contiguous())
    if splits is None:
        splits = split_decodes(seq_lens, block_tables.shape[1] * block_size)
    num_items, group = splits.item_seqs.shape[0], num_heads // num_kv_heads
    run_ends, first_parts, num_parts, max_queries = None, splits.first_items, num_items, 1
    if splits.runs is not None:
        run_ends, first_parts, max_queries = splits.runs
        num_parts = num_seqs + (num_items - num_seqs) * max_queries
    tile = find_run_tile(DECODE_TILES, q, kv_cache, max_queries)
    num_tiles = triton.cdiv(max_queries, tile.num_rows // group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    num_rows = num_parts * num_heads
    partial = float_workspace(num_rows * (head_dim + 1), q.device)
    log_sums = partial[num_rows * head_dim :]
    score_scale, cap_log2 = score_arguments(scale, variant)
    window, chunk = variant.window or None, variant.chunk or None
    _attend_items[(num_items, num_kv_heads, num_tiles)](
        q, as_stored(kv_cache), kv_scales, block_tables, seq_lens, splits.item_len, splits.item_seqs,
        splits.first_items, run_ends, first_parts, out, partial, log_sums, variant.alibi_slopes, variant.sinks,
        score_scale, cap_log2, window, chunk, num_seqs,
        q.stride(0), q.stride(1), *kv_cache.stride()[:3], block_tables.stride(0),
        GROUP=group, HEAD_DIM=head_dim, CACHE_BLOCK=block_size,
        BLOCK_R=tile.num_rows, BLOCK_K=tile.num_keys, BLOCK_D=block_d, UPCAST=INTERPRETED,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    merge_items[(num_seqs, num_heads)](
        partial, log_sums, seq_lens, splits.item_len, first_parts, out, window, chunk,
        HEAD_DIM=head_dim, BLOCK_I=MERGED_ITEMS, BLOCK_D=block_d,
    )  # fmt: skip
    return out
