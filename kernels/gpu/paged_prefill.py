"""Causal attention of ragged chunks over the paged cache, cached prefixes included (Dao, *FlashAttention-2*, 2023).

The kernel serves chunked prefill, prefill after a prefix hit, and new tokens of draft models. A tile's rows are
(query, head) pairs of one sequence and one KV head, so that the group shares every read of a key. The number of
tiles does not depend on the chunk lengths: sequence s starts at tile ``query_start[s] // queries per tile + s``,
which leaves room for its last, partly filled tile. A program finds its sequence by bisection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention_variant import PLAIN, AttentionVariant
from .attention_inner import attend_keys, first_visible, load_per_head, score_arguments
from .quantized_kv import as_stored
from .tile_configs import INTERPRETED, LARGE_PREFILL_TILES, SMALL_PREFILL_TILES, find_tile

# Mean (query, head) pairs per sequence and KV head from which the large tile is faster.
LARGE_TILE_ROWS = 64


@triton.jit
def find_sequence(query_start_ptr, tile, num_seqs, TILE_QUERIES: tl.constexpr):
    """Return the last sequence that starts at or before this tile."""
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        starts_before = tl.load(query_start_ptr + middle) // TILE_QUERIES + middle <= tile
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle)
    return low


# The number of chunks and the width of the block tables change from step to step, and so does the alignment of the
# chunks' tables and lengths, which follow those of the decoding sequences.
@triton.jit(
    do_not_specialize=["num_seqs", "stride_table"],
    do_not_specialize_on_alignment=["tables_ptr", "seq_lens_ptr"],
)
def _attend_chunks(
    q_ptr,  # [T, Hq, D]
    cache_ptr,  # [N, 2, Hkv, B, D]
    scales_ptr,  # [N, 2, Hkv, B]
    tables_ptr,  # [S, M]
    query_start_ptr,  # [S + 1]
    seq_lens_ptr,  # [S]
    out_ptr,  # [T, Hq, D]
    slopes_ptr,  # [Hq]
    sinks_ptr,  # [Hq]
    score_scale,
    cap_log2,
    window,
    chunk,
    num_seqs,
    stride_q_token,
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
    # grid: (tiles, Hkv)
    TILE_QUERIES: tl.constexpr = BLOCK_R // GROUP
    # The last tiles of a sequence have the most keys, so they start first.
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    seq = find_sequence(query_start_ptr, tile, num_seqs, TILE_QUERIES)
    chunk_start = tl.load(query_start_ptr + seq)
    chunk_len = tl.load(query_start_ptr + seq + 1) - chunk_start
    first_query = (tile - chunk_start // TILE_QUERIES - seq) * TILE_QUERIES
    if first_query >= chunk_len:
        return
    num_cached = tl.load(seq_lens_ptr + seq) - chunk_len
    num_keys = num_cached + tl.minimum(first_query + TILE_QUERIES, chunk_len)

    offs_r = tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    queries = first_query + offs_r // GROUP
    heads = kv_head * GROUP + offs_r % GROUP
    tokens = (chunk_start + queries).to(tl.int64)
    mask_r = (offs_r < TILE_QUERIES * GROUP) & (queries < chunk_len)
    mask_q = mask_r[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_rows = tokens * stride_q_token + heads * stride_q_head
    q = tl.load(q_ptr + q_rows[:, None] + offs_d[None, :], mask=mask_q, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    head_ptr = cache_ptr + kv_head * stride_cache_head
    if scales_ptr is not None:
        scales_ptr += kv_head * (stride_cache_head // HEAD_DIM)
    slopes = None
    if slopes_ptr is not None:
        slopes = load_per_head(slopes_ptr, heads, mask_r)
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    out = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    if sinks_ptr is not None:
        # A key whose value is 0.
        top = load_per_head(sinks_ptr, heads, mask_r)
        total += 1.0
    last_keys = num_cached + queries
    # Keys from `full_start` to `full_end` are visible to every query of the tile; the others need a mask.
    visible_to_first = num_cached + first_query + 1
    full_start = 0
    first_keys = None
    if window is not None or chunk is not None:
        first_keys = first_visible(last_keys, window, chunk)
        start = first_visible(visible_to_first - 1, window, chunk)
        num_partly_visible = first_visible(num_keys - 1, window, chunk) - start
        full_start = tl.minimum(start + tl.cdiv(num_partly_visible, BLOCK_K) * BLOCK_K, num_keys)
        out, top, total = attend_keys(
            q, out, top, total, head_ptr, scales_ptr, table_ptr, start, full_start, last_keys,
            score_scale, cap_log2, slopes, first_keys, stride_cache_block, stride_cache_kv, True,
            HEAD_DIM, CACHE_BLOCK, BLOCK_K, BLOCK_D,
        )  # fmt: skip
    full_end = full_start + tl.maximum(visible_to_first - full_start, 0) // BLOCK_K * BLOCK_K
    out, top, total = attend_keys(
        q, out, top, total, head_ptr, scales_ptr, table_ptr, full_start, full_end, last_keys,
        score_scale, cap_log2, slopes, None, stride_cache_block, stride_cache_kv, False,
        HEAD_DIM, CACHE_BLOCK, BLOCK_K, BLOCK_D,
    )  # fmt: skip
    out, top, total = attend_keys(
        q, out, top, total, head_ptr, scales_ptr, table_ptr, full_end, num_keys, last_keys,
        score_scale, cap_log2, slopes, first_keys, stride_cache_block, stride_cache_kv, True,
        HEAD_DIM, CACHE_BLOCK, BLOCK_K, BLOCK_D,
    )  # fmt: skip
    # Rows past the chunk's end may have no visible key.
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = (tokens * num_heads + heads) * HEAD_DIM
    tl.store(out_ptr + out_rows[:, None] + offs_d[None, :], out, mask=mask_q)


def paged_prefill_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    variant: AttentionVariant = PLAIN,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """See kernels.paged_attention; the output of tokens outside all chunks is undefined."""
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    num_seqs, group = seq_lens.shape[0], num_heads // num_kv_heads
    assert q.stride(2) == 1
    assert kv_cache.stride()[3:] == (head_dim, 1)
    assert num_heads % num_kv_heads == 0
    assert block_tables.stride(1) == 1
    assert kv_scales is None or (kv_scales.is_contiguous() and kv_cache.is_contiguous())
    is_large = num_tokens * group >= LARGE_TILE_ROWS * num_seqs
    tile = find_tile(LARGE_PREFILL_TILES if is_large else SMALL_PREFILL_TILES, q, kv_cache)
    num_tiles = num_tokens // (tile.num_rows // group) + num_seqs
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    _attend_chunks[(num_tiles, num_kv_heads)](
        q, as_stored(kv_cache), kv_scales, block_tables, query_start, seq_lens, out,
        variant.alibi_slopes, variant.sinks, *score_arguments(scale, variant),
        variant.window or None, variant.chunk or None, num_seqs,
        q.stride(0), q.stride(1), *kv_cache.stride()[:3], block_tables.stride(0),
        GROUP=group, HEAD_DIM=head_dim, CACHE_BLOCK=block_size,
        BLOCK_R=tile.num_rows, BLOCK_K=tile.num_keys, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        UPCAST=INTERPRETED, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
