"""Attention over a paged KV cache: decoding sequences with one query each, and ragged chunks of prompts.

Plain PyTorch: blocks are gathered into contiguous keys and values, then scaled_dot_product_attention runs on
those. Slots that hold no token of a sequence are never trusted to hold finite numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu
from .decode_splits import DecodeSplits
from .dispatch import on_gpu

# A chunk's queries are cut into tiles, so that its mask stays small and keys after a tile are not computed.
QUERY_TILE_LEN = 128
# Decoding sequences share one call as long as that gathers at most so many blocks ...
MAX_GATHERED_BLOCKS = 8192
# ... and at most so many times the blocks that the sequences really have.
MAX_PADDING_RATIO = 2


@on_gpu("paged_decode")
def paged_decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    splits: DecodeSplits | None = None,
) -> Tensor:
    """Attention of one new token a sequence to all of the sequence.

    Args:
        q: [S, Hq, D].
        kv_cache: [N, 2, Hkv, B, D], the new tokens' keys and values included.
        block_tables: [S, M] int32; entries past a sequence's blocks are ignored.
        seq_lens: [S] int32, the new token included; 0 for padding, whose output means nothing.
        splits: how a GPU cuts the sequences; worked out anew if it is None.

    Returns:
        [S, Hq, D].
    """
    if cpu.takes_attention(q, kv_cache):
        return cpu.paged_decode_attention(q, kv_cache, block_tables, seq_lens, scale)
    block_size = kv_cache.shape[3]
    num_blocks = ((seq_lens + (block_size - 1)) // block_size).tolist()
    groups = list(_groups_of_like_length(num_blocks))
    if len(groups) == 1:
        return _decode_group(q, kv_cache, block_tables[:, : max(num_blocks)], seq_lens, scale)
    out = torch.empty_like(q)
    for members in groups:
        width = max(num_blocks[member] for member in members)
        index = torch.tensor(members, device=q.device)
        out[index] = _decode_group(q[index], kv_cache, block_tables[index, :width], seq_lens[index], scale)
    return out


@on_gpu("paged_prefill")
def paged_prefill_attention(
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """Causal attention of each sequence's last tokens to all of the sequence, cached prefix included.

    Args:
        q: [T, Hq, D], the sequences' queries one after the other.
        kv_cache: [N, 2, Hkv, B, D], the chunks' own keys and values included.
        block_tables: [S, M] int32; entries past a sequence's blocks are ignored.
        query_start: [S + 1] int32; sequence s has the queries ``query_start[s]:query_start[s + 1]``.
        seq_lens: [S] int32, the chunk included.

    Returns:
        [T, Hq, D].
    """
    if cpu.takes_attention(q, kv_cache):
        return cpu.paged_prefill_attention(q, kv_cache, block_tables, query_start, seq_lens, scale)
    out = torch.empty_like(q)
    bounds = pairwise(query_start.tolist())
    for block_table, (start, end), seq_len in zip(block_tables, bounds, seq_lens.tolist(), strict=True):
        if end > start:
            keys, values = _gather_sequence(kv_cache, block_table, seq_len)
            _attend_chunk(q[start:end], keys, values, scale, out[start:end])
    return out


def _groups_of_like_length(num_blocks: list[int]) -> Iterator[list[int]]:
    """Indices in groups that waste little when padded to their longest member."""
    order = sorted(range(len(num_blocks)), key=num_blocks.__getitem__)
    group: list[int] = []
    used = 0
    for member in order:
        padded = num_blocks[member] * (len(group) + 1)
        used += num_blocks[member]
        if group and (padded > MAX_GATHERED_BLOCKS or padded > MAX_PADDING_RATIO * used):
            yield group
            group, used = [], num_blocks[member]
        group.append(member)
    yield group


def _decode_group(
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """Attention of sequences padded to the same number of blocks: one gather, one call."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[2]
    keys, values, dead = _gather_blocks(kv_cache, block_tables, seq_lens)
    # The heads that share a KV head become queries of it; SDPA's own enable_gqa was 2 to 4 times slower.
    packed = q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = None if dead is None else ~dead[:, None, None, :]
    return F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale).reshape(q.shape)


def _gather_blocks(
    kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values of padded sequences, and which slots hold no token.

    Args:
        block_tables: [S, M] int32.
        seq_lens: [S] int32.

    Returns:
        Keys and values, each [S, Hkv, M B, D], zero in dead slots; dead [S, M B] bool, None if there is none.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_seqs, width = block_tables.shape
    # One contiguous piece of B D numbers a (sequence, key or value, head, block), gathered in that order.
    pieces = torch.arange(2 * num_kv_heads, device=kv_cache.device)
    index = pieces[:, None] + (block_tables * (2 * num_kv_heads)).unsqueeze(1)
    flat = kv_cache.view(num_blocks * 2 * num_kv_heads, block_size * head_dim)
    gathered = flat.index_select(0, index.view(-1)).view(
        num_seqs, 2, num_kv_heads, width * block_size, head_dim
    )
    dead = torch.arange(width * block_size, device=kv_cache.device) >= seq_lens[:, None]
    dead_seqs, dead_slots = dead.nonzero(as_tuple=True)
    if dead_seqs.numel() == 0:
        return gathered[:, 0], gathered[:, 1], None
    gathered[dead_seqs, :, :, dead_slots] = 0
    return gathered[:, 0], gathered[:, 1], dead


def _gather_sequence(kv_cache: Tensor, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values, each [Hkv, seq_len, D]."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    blocks = kv_cache.index_select(0, block_table[: -(-seq_len // block_size)])
    gathered = blocks.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
    return gathered[0, :, :seq_len], gathered[1, :, :seq_len]


def _attend_chunk(q: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
    """Causal attention of the last tokens of one sequence, tile by tile, into `out`.

    Args:
        q, out: [n, Hq, D].
        keys, values: [Hkv, L, D], the last n of which belong to the queries.
    """
    (chunk_len, num_heads, head_dim), (num_kv_heads, seq_len, _) = q.shape, keys.shape
    group_len = num_heads // num_kv_heads
    grouped = q.view(chunk_len, num_kv_heads, group_len, head_dim).permute(1, 2, 0, 3)
    for start in range(0, chunk_len, QUERY_TILE_LEN):
        end = min(start + QUERY_TILE_LEN, chunk_len)
        num_keys = seq_len - chunk_len + end
        shape = num_kv_heads, group_len, num_keys, head_dim
        mask = torch.ones(end - start, num_keys, dtype=torch.bool, device=q.device).tril(
            num_keys - end + start
        )
        attended = F.scaled_dot_product_attention(
            grouped[:, :, start:end],
            keys[:, None, :num_keys].expand(shape),
            values[:, None, :num_keys].expand(shape),
            attn_mask=mask,
            scale=scale,
        )
        out[start:end] = attended.permute(2, 0, 1, 3).reshape(end - start, num_heads, head_dim)
