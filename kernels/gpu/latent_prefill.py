"""Expanded latent attention of ragged chunks: keys and values of some heads at a time are computed from the latents.

The expansion is a matrix product of its own, so that its result is shared by all queries of a sequence. The shared,
rotated part of the keys is read from the gathered latents and is never copied per head.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..latent_attention import EXPANDED_BYTES, ChunkBounds, Expansion, head_groups
from ..quantized_kv import dequantize
from .attention_inner import LOG2_E
from .paged_prefill import find_sequence
from .tile_configs import INTERPRETED, LATENT_PREFILL_TILES, find_latent_tile


@triton.jit(
    do_not_specialize=["num_seqs", "stride_visible"],
    do_not_specialize_on_alignment=["query_start_ptr", "key_start_ptr", "visible_ptr"],
)
def _attend_expanded(
    q_ptr,  # [T, Hq, N + R]
    keys_values_ptr,  # [L, Hg, N + V], of the sequences one after the other
    latents_ptr,  # [L, C + R]
    query_start_ptr,  # [S + 1]
    key_start_ptr,  # [S + 1]
    visible_ptr,  # [T, L]
    out_ptr,  # [T, Hq, V]
    score_scale,
    num_seqs,
    stride_q_token,
    stride_q_head,
    stride_key,
    stride_latent,
    stride_visible,
    stride_out_token,
    KEY_DIM: tl.constexpr,
    SHARED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # grid: (tiles, Hg)
    # The last tiles of a sequence have the most keys, so they start first.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    seq = find_sequence(query_start_ptr, tile, num_seqs, BLOCK_Q)
    chunk_start = tl.load(query_start_ptr + seq)
    chunk_len = tl.load(query_start_ptr + seq + 1) - chunk_start
    first_query = (tile - chunk_start // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= chunk_len:
        return
    key_start = tl.load(key_start_ptr + seq).to(tl.int64)
    num_cached = tl.load(key_start_ptr + seq + 1) - key_start - chunk_len
    num_keys = num_cached + tl.minimum(first_query + BLOCK_Q, chunk_len)

    offs_q = first_query + tl.arange(0, BLOCK_Q)
    offs_n = tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    offs_v = tl.arange(0, BLOCK_V)
    offs_k = tl.arange(0, BLOCK_K)
    mask_q = offs_q < chunk_len
    mask_n = offs_n < KEY_DIM
    mask_r = offs_r < SHARED_DIM
    mask_v = offs_v < VALUE_DIM
    tokens = (chunk_start + offs_q).to(tl.int64)
    q_ptrs = q_ptr + tokens[:, None] * stride_q_token + head * stride_q_head
    q = tl.load(q_ptrs + offs_n[None, :], mask=mask_q[:, None] & mask_n[None, :], other=0.0)
    q_shared = tl.load(q_ptrs + KEY_DIM + offs_r[None, :], mask=mask_q[:, None] & mask_r[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
        q_shared = q_shared.to(tl.float32)

    head_ptr = keys_values_ptr + key_start * stride_key + head * (KEY_DIM + VALUE_DIM)
    shared_ptr = latents_ptr + key_start * stride_latent + LATENT_DIM
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    for start in range(0, num_keys, BLOCK_K):
        positions = start + offs_k
        live = positions < num_keys
        rows = positions.to(tl.int64)
        key_ptrs = head_ptr + rows * stride_key
        keys = tl.load(key_ptrs[None, :] + offs_n[:, None], mask=mask_n[:, None] & live[None, :], other=0.0)
        shared = tl.load(
            shared_ptr + rows[None, :] * stride_latent + offs_r[:, None],
            mask=mask_r[:, None] & live[None, :],
            other=0.0,
        )
        values = tl.load(
            key_ptrs[:, None] + KEY_DIM + offs_v[None, :], mask=live[:, None] & mask_v[None, :], other=0.0
        )
        scores = tl.dot(q, keys.to(q.dtype), input_precision="tf32x3")
        scores = tl.dot(q_shared, shared.to(q.dtype), scores, input_precision="tf32x3") * score_scale
        visible = (positions[None, :] <= num_cached + offs_q[:, None]) & live[None, :]
        if visible_ptr is not None:
            visible_ptrs = visible_ptr + tokens[:, None] * stride_visible + positions[None, :]
            visible &= tl.load(visible_ptrs, mask=mask_q[:, None] & live[None, :], other=1) != 0
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Without a mask the first key is visible to every query, so no row is without a score after the first tile.
        shift = new_top
        if visible_ptr is not None:
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        out = tl.dot(weights.to(q.dtype), values.to(q.dtype), out * decay[:, None], input_precision="tf32x3")
        top = new_top
    out_ptrs = out_ptr + tokens[:, None] * stride_out_token + head * VALUE_DIM + offs_v[None, :]
    tl.store(out_ptrs, out / total[:, None], mask=mask_q[:, None] & mask_v[None, :])


def latent_prefill_attention(
    q: Tensor,
    latents: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    bounds: ChunkBounds,
    scale: float,
    expansion: Expansion,
    scales: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """See kernels.latent_attention; the output of tokens outside all chunks is undefined."""
    matrix = expansion.matrix
    num_heads, key_value_dim, latent_dim = matrix.shape
    qk_rope_head_dim = latents.shape[-1] - latent_dim
    qk_nope_head_dim = q.shape[2] - qk_rope_head_dim
    v_head_dim = key_value_dim - qk_nope_head_dim
    assert q.stride(2) == 1
    assert block_tables.stride(1) == 1
    assert visible is None or (visible.dtype == torch.bool and visible.stride(1) == 1)
    out = torch.empty((q.shape[0], num_heads, v_head_dim), dtype=q.dtype, device=q.device)
    tile = find_latent_tile(LATENT_PREFILL_TILES, qk_nope_head_dim, q, latents)
    head_bytes = key_value_dim * q.itemsize
    offset = 0
    for first, end in _sequence_groups(bounds, EXPANDED_BYTES // head_bytes):
        lens = seq_lens[first:end]
        key_start = torch.cat((lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)))
        num_keys, num_queries = sum(bounds.seq_lens[first:end]), sum(bounds.query_lens[first:end])
        starts = query_start[first : end + 1] - query_start[first]
        gathered = _gather(latents, block_tables[first:end], key_start, num_keys, scales, q.dtype)
        for heads in head_groups(num_heads, num_keys * head_bytes):
            group = matrix[heads]
            keys_values = F.linear(gathered[:, :latent_dim], group.reshape(-1, latent_dim))
            own, into = q[offset:, heads], out[offset:, heads]
            own_visible = None if visible is None else visible[offset:].view(torch.uint8)
            num_tiles = num_queries // tile.num_rows + end - first
            _attend_expanded[(num_tiles, len(group))](
                own, keys_values, gathered, starts, key_start, own_visible, into,
                scale * LOG2_E.value, end - first, own.stride(0), own.stride(1), keys_values.stride(0),
                gathered.stride(0), 0 if visible is None else visible.stride(0), into.stride(0),
                KEY_DIM=qk_nope_head_dim, SHARED_DIM=qk_rope_head_dim, VALUE_DIM=v_head_dim, LATENT_DIM=latent_dim,
                BLOCK_Q=tile.num_rows, BLOCK_K=tile.num_keys,
                BLOCK_N=max(16, triton.next_power_of_2(qk_nope_head_dim)),
                BLOCK_R=max(16, triton.next_power_of_2(qk_rope_head_dim)),
                BLOCK_V=max(16, triton.next_power_of_2(v_head_dim)), UPCAST=INTERPRETED,
                num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip
        offset += num_queries
    return out


def _sequence_groups(bounds: ChunkBounds, max_keys: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of sequences of `max_keys` tokens together at most, of one sequence at least."""
    first, num_keys = 0, 0
    for index, length in enumerate(bounds.seq_lens):
        if index > first and num_keys + length > max_keys:
            yield first, index
            first, num_keys = index, 0
        num_keys += length
    yield first, len(bounds.seq_lens)


def _gather(
    latents: Tensor,
    block_tables: Tensor,
    key_start: Tensor,
    num_keys: int,
    scales: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the latents of all tokens of the sequences, one after the other, [L, C + R]."""
    block_size = latents.shape[3]
    index = torch.arange(num_keys, dtype=torch.int32, device=latents.device)
    rows = torch.searchsorted(key_start, index, right=True) - 1
    positions = index - key_start[rows]
    slots = block_tables[rows, positions // block_size].long() * block_size + positions % block_size
    gathered = latents.flatten(0, 3).index_select(0, slots)
    if scales is None:
        return gathered
    return dequantize(gathered, scales.view(-1).index_select(0, slots), dtype)
