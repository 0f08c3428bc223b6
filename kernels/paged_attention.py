"""Attention over a paged KV cache: decoding sequences with one query each, and ragged chunks of prompts.

The PyTorch references gather blocks into contiguous keys and values, dequantize them to the dtype of the queries, and
run softmax attention on the result. Slots without a token of the sequence may hold NaN. Blocks that lie wholly before
the window or the chunk are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_variant import PLAIN, AttentionVariant
from .decode_splits import DecodeSplits
from .dispatch import on_gpu
from .native import ops as cpu
from .quantized_kv import dequantize

# Queries of a chunk per tile: tiles keep the mask small and skip the keys after them.
QUERY_TILE_LEN = 128
# Decoding sequences are padded to one length and share a call that gathers at most so many blocks ...
MAX_GATHERED_BLOCKS = 8192
# ... and at most so many times the blocks that the sequences have without padding.
MAX_PADDING_RATIO = 2


@on_gpu("paged_decode")
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
    """Compute the attention of one new token per sequence to the whole sequence.

    Args:
        q: [S, Hq, D].
        kv_cache: [N, 2, Hkv, B, D], the new tokens' keys and values included.
        block_tables: [S, M] int32; entries past a sequence's blocks are ignored.
        seq_lens: [S] int32, the new token included; 0 for padding, whose output is undefined.
        splits: work items on a GPU, of which rows of the same sequence may be runs; None: computed here.
        variant: window, chunk, soft cap, ALiBi and sinks.
        kv_scales: [N, 2, Hkv, B] float32, scales of a quantized cache (see kernels.quantized_kv).

    Returns:
        [S, Hq, D].
    """
    if cpu.supports_attention(q, kv_cache):
        return cpu.paged_decode_attention(q, kv_cache, block_tables, seq_lens, scale, variant, kv_scales)
    if (head_dim := _wider_op(q, kv_cache)) is not None:
        firsts = _first_visible(seq_lens - 1, variant)
        gathered = _gather_wider(kv_cache, kv_scales, block_tables, firsts, seq_lens, head_dim)
        wide_q = F.pad(q, (0, head_dim - q.shape[2])).contiguous()
        out = cpu.paged_decode_attention(
            wide_q, gathered.cache, gathered.tables, seq_lens, scale, variant, gathered.scales
        )
        return out[..., : q.shape[2]].contiguous()
    cache = _Cache(kv_cache, kv_scales, q.dtype)
    block_size = kv_cache.shape[3]
    first_blocks = _first_visible(seq_lens - 1, variant) // block_size
    num_blocks = (-(-seq_lens // block_size) - first_blocks).tolist()
    out = torch.empty_like(q)
    for members in _group_by_length(num_blocks):
        index = torch.tensor(members, device=q.device)
        width = max(num_blocks[member] for member in members)
        columns = first_blocks[index, None] + torch.arange(width, device=q.device)
        tables = block_tables[index].gather(1, columns.clamp_(max=block_tables.shape[1] - 1))
        out[index] = _decode_group(
            q[index], cache, tables, first_blocks[index], seq_lens[index], scale, variant
        )
    return out


@on_gpu("paged_prefill")
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
    """Compute the causal attention of each sequence's last tokens to the whole sequence, cached prefix included.

    Args:
        q: [T, Hq, D], the concatenated queries of the sequences.
        kv_cache: [N, 2, Hkv, B, D], the chunks' own keys and values included.
        block_tables: [S, M] int32; entries past a sequence's blocks are ignored.
        query_start: [S + 1] int32; sequence s has queries ``query_start[s]:query_start[s + 1]``.
        seq_lens: [S] int32, the chunk included.
        variant, kv_scales: as for paged_decode_attention.

    Returns:
        [T, Hq, D].
    """
    if cpu.supports_attention(q, kv_cache):
        return cpu.paged_prefill_attention(
            q, kv_cache, block_tables, query_start, seq_lens, scale, variant, kv_scales
        )
    if (head_dim := _wider_op(q, kv_cache)) is not None:
        firsts = _first_visible(seq_lens - query_start.diff(), variant)
        gathered = _gather_wider(kv_cache, kv_scales, block_tables, firsts, seq_lens, head_dim)
        wide_q = F.pad(q, (0, head_dim - q.shape[2])).contiguous()
        out = cpu.paged_prefill_attention(
            wide_q, gathered.cache, gathered.tables, query_start, seq_lens, scale, variant, gathered.scales
        )
        return out[..., : q.shape[2]].contiguous()
    cache = _Cache(kv_cache, kv_scales, q.dtype)
    out = torch.empty_like(q)
    bounds = pairwise(query_start.tolist())
    for block_table, (start, end), seq_len in zip(block_tables, bounds, seq_lens.tolist(), strict=True):
        if end > start:
            first = int(_first_visible(torch.tensor(seq_len - (end - start)), variant))
            keys, values = cache.gather_sequence(block_table, first, seq_len)
            _attend_chunk(q[start:end], keys, values, seq_len, scale, variant, out[start:end])
    return out


def paged_span_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    start: int,
    end: int,
    scale: float,
    variant: AttentionVariant = PLAIN,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Compute the attention of successive tokens of one sequence, each of which attends to all tokens before `end`.

    A window bounds only how far a token attends to those before it. These are the tokens of an image, few of a
    prompt's, so that every device computes them with PyTorch.

    Args:
        q: [n, Hq, D], of the tokens from `start` on.
        kv_cache: [N, 2, Hkv, B, D], the keys and values before `end` included.
        block_table: [M] int32.
        variant: window, soft cap and sinks.
        kv_scales: as for paged_decode_attention.

    Returns:
        [n, Hq, D].
    """
    cache, (num_queries, num_heads, head_dim) = _Cache(kv_cache, kv_scales, q.dtype), q.shape
    first = max(0, start + 1 - variant.window) if variant.window else 0
    keys, values = (each[:, None] for each in cache.gather_sequence(block_table, first, end))
    grouped = q.view(num_queries, cache.num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    shape = cache.num_kv_heads, num_heads // cache.num_kv_heads, end - first, head_dim
    positions = torch.arange(first, end, device=q.device)
    sinks = None if variant.sinks is None else variant.sinks.view(*shape[:2], 1, 1)
    parts = []
    for tile in range(0, num_queries, QUERY_TILE_LEN):
        own = grouped[:, :, tile : tile + QUERY_TILE_LEN]
        queries = torch.arange(start + tile, start + tile + own.shape[2], device=q.device)[:, None]
        visible = positions >= _first_visible(queries, variant) if variant.window else None
        parts.append(
            _attend(
                own, keys.expand(shape), values.expand(shape), visible, None, sinks, scale, variant.soft_cap
            )
        )
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3).reshape(q.shape)


class _WiderCache(NamedTuple):
    """The blocks that a step attends to, with heads of a dimension that an op supports."""

    cache: Tensor
    scales: Tensor | None
    tables: Tensor


def _wider_op(q: Tensor, kv_cache: Tensor) -> int | None:
    """Return the dimension of heads that an op supports and that theirs are padded to. Returns None for none."""
    if not cpu.supports(q) or kv_cache.dtype not in cpu.cache_dtypes():
        return None
    return cpu.attention_dim(q.shape[2])


def _gather_wider(
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    firsts: Tensor,
    seq_lens: Tensor,
    head_dim: int,
) -> _WiderCache:
    """Gather the blocks of sequences from position `firsts` [S] on, with zeros behind the numbers of each head."""
    block_size = kv_cache.shape[3]
    columns = torch.arange(block_tables.shape[1])
    is_read = columns >= (firsts // block_size).unsqueeze(1)
    is_read &= columns < ((seq_lens + block_size - 1) // block_size).unsqueeze(1)
    ids = block_tables[is_read].long()
    tables = torch.zeros_like(block_tables)
    tables[is_read] = torch.arange(len(ids), dtype=tables.dtype)
    cache = kv_cache.new_empty(max(1, len(ids)), *kv_cache.shape[1:4], head_dim)
    # torch computes on no float8.
    stored = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    numbers = kv_cache.view(torch.uint8) if cache.itemsize == 1 else kv_cache
    stored[..., kv_cache.shape[4] :] = 0
    stored[: len(ids), ..., : kv_cache.shape[4]] = numbers[ids]
    return _WiderCache(cache, None if kv_scales is None else kv_scales[ids], tables)


class _Cache:
    """A layer's KV cache, from which keys and values are gathered.

    Args:
        blocks: [N, 2, Hkv, B, D].
        scales: [N, 2, Hkv, B] of a quantized cache, otherwise None.
        dtype: of gathered keys and values.
    """

    def __init__(self, blocks: Tensor, scales: Tensor | None, dtype: torch.dtype) -> None:
        self.num_kv_heads, self.block_size = blocks.shape[2:4]
        self._blocks, self._scales, self._dtype = blocks, scales, dtype

    def gather_blocks(self, block_tables: Tensor) -> Tensor:
        """Gather blocks: [S, M] block ids -> [S, 2, Hkv, M B, D]."""
        gathered = _gather_blocks(self._blocks, block_tables)
        if self._scales is None:
            return gathered
        return dequantize(gathered, _gather_blocks(self._scales, block_tables), self._dtype)

    def gather_sequence(self, block_table: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of positions `first` to `end`, each [Hkv, end - first, D]."""
        first_block = first // self.block_size
        ids = block_table[first_block : -(-end // self.block_size)]
        live = slice(first - first_block * self.block_size, end - first_block * self.block_size)
        keys, values = self.gather_blocks(ids.unsqueeze(0))[0, :, :, live]
        return keys, values


def _gather_blocks(blocks: Tensor, block_tables: Tensor) -> Tensor:
    """Gather blocks: [N, 2, Hkv, B, ...] and [S, M] -> [S, 2, Hkv, M B, ...]."""
    num_blocks, _, num_kv_heads, block_size, *rest = blocks.shape
    num_seqs, width = block_tables.shape
    # One contiguous piece of B slots per (sequence, key or value, head, block), gathered in that order.
    pieces = torch.arange(2 * num_kv_heads, device=blocks.device)
    index = pieces[:, None] + (block_tables * (2 * num_kv_heads)).unsqueeze(1)
    flat = blocks.reshape(num_blocks * 2 * num_kv_heads, -1)
    return flat.index_select(0, index.view(-1)).view(num_seqs, 2, num_kv_heads, width * block_size, *rest)


def _first_visible(positions: Tensor, variant: AttentionVariant) -> Tensor:
    """Return the first position that the query of each position attends to."""
    first = (positions + 1 - variant.window).clamp_(min=0) if variant.window else torch.zeros_like(positions)
    return torch.maximum(first, positions // variant.chunk * variant.chunk) if variant.chunk else first


def _group_by_length(num_blocks: list[int]) -> Iterator[list[int]]:
    """Yield groups of indices that need little padding to their longest member."""
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
    q: Tensor,
    cache: _Cache,
    block_tables: Tensor,
    first_blocks: Tensor,
    seq_lens: Tensor,
    scale: float,
    variant: AttentionVariant,
) -> Tensor:
    """Compute the attention of sequences padded to the same number of blocks: one gather, one softmax.

    Args:
        block_tables: [S, W], each sequence's blocks from the first visible one on.
        first_blocks: [S], index of the first visible block.
    """
    num_seqs, num_heads, head_dim = q.shape
    keys_values = cache.gather_blocks(block_tables)
    positions = (
        torch.arange(keys_values.shape[3], device=q.device) + (first_blocks * cache.block_size)[:, None]
    )
    queries = seq_lens[:, None] - 1
    distances = positions - queries
    visible = _visible(positions, queries, variant)
    dead_seqs, dead_slots = (~visible).nonzero(as_tuple=True)
    keys_values[dead_seqs, :, :, dead_slots] = 0
    # The query heads of a KV head become queries of one head; SDPA's enable_gqa was 2 to 4 times slower.
    packed = q.view(num_seqs, cache.num_kv_heads, num_heads // cache.num_kv_heads, head_dim)
    slopes, sinks = variant.alibi_slopes, variant.sinks
    return _attend(
        packed,
        keys_values[:, 0],
        keys_values[:, 1],
        None if dead_seqs.numel() == 0 else visible[:, None, None, :],
        None if slopes is None else slopes.view(packed.shape[1:3])[..., None] * distances[:, None, None, :],
        None if sinks is None else sinks.view(*packed.shape[1:3], 1),
        scale,
        variant.soft_cap,
    ).reshape(q.shape)


def _attend_chunk(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seq_len: int,
    scale: float,
    variant: AttentionVariant,
    out: Tensor,
) -> None:
    """Compute the causal attention of the last tokens of one sequence, tile by tile, into `out`.

    Args:
        q, out: [n, Hq, D].
        keys, values: [Hkv, L, D], of the sequence's last L tokens.
    """
    (chunk_len, num_heads, head_dim), (num_kv_heads, num_keys, _) = q.shape, keys.shape
    group_len = num_heads // num_kv_heads
    grouped = q.view(chunk_len, num_kv_heads, group_len, head_dim).permute(1, 2, 0, 3)
    positions = torch.arange(seq_len - num_keys, seq_len, device=q.device)
    slopes, sinks = variant.alibi_slopes, variant.sinks
    for start in range(0, chunk_len, QUERY_TILE_LEN):
        end = min(start + QUERY_TILE_LEN, chunk_len)
        num_visible = num_keys - chunk_len + end
        shape = num_kv_heads, group_len, num_visible, head_dim
        queries = positions[num_keys - chunk_len + start : num_visible, None]
        distances = positions[:num_visible] - queries
        attended = _attend(
            grouped[:, :, start:end],
            keys[:, None, :num_visible].expand(shape),
            values[:, None, :num_visible].expand(shape),
            _visible(positions[:num_visible], queries, variant),
            None if slopes is None else slopes.view(num_kv_heads, group_len, 1, 1) * distances,
            None if sinks is None else sinks.view(num_kv_heads, group_len, 1, 1),
            scale,
            variant.soft_cap,
        )
        out[start:end] = attended.permute(2, 0, 1, 3).reshape(end - start, num_heads, head_dim)


def _visible(keys: Tensor, queries: Tensor, variant: AttentionVariant) -> Tensor:
    """Return the mask of visible keys, from the positions of keys and of queries."""
    return (keys <= queries) & (keys >= _first_visible(queries, variant))


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    soft_cap: float,
) -> Tensor:
    """Compute softmax attention of [..., n, D] to [..., L, D].

    Args:
        visible, bias: broadcast to [..., n, L].
        sinks: broadcast to [..., n, 1].
    """
    if bias is None and sinks is None and not soft_cap:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scale)
    # float32: half precision would round the distances in the bias.
    scores = (q.float() @ keys.float().mT) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return (scores.softmax(dim=-1) @ values.float()).to(q.dtype)
    with_sink = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return (with_sink.softmax(dim=-1)[..., :-1] @ values.float()).to(q.dtype)
