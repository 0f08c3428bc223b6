"""Attention to blocks of keys that an indexer chooses: for each KV head (MiniMax-M3, 2026), or for all (Qwen4, 2026).

A query of MiniMax-M3 scores every key up to its own with a small head; the best key of a block is the block's score.
A query of Qwen4 scores one key per block with several heads. Both attend to the keys of the best blocks alone. These
are pieces of the cache's blocks in another order: each token and KV head is a sequence of its own, whose block table
names them, its own block last.

Scores and choices are computed in PyTorch, for every device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import has_kernels
from .paged_attention import paged_decode_attention
from .shared_attention import choose_entries

# Scores in float32, or gathered keys and values, at a time; those of one query are never divided.
TILE_BYTES = 64 << 20
# Sequences of a call on a GPU, which needs workspace for the partial results of each.
MAX_SEQUENCES = 4096


def gather_index_keys(blocks: Tensor, tables: Tensor) -> Tensor:
    """Return the keys of indexers in blocks, whose halves are cached as keys and values of one head.

    Args:
        blocks: [N, 2, 1, B, I / 2].
        tables: [G, M] block ids.

    Returns:
        [G, M * B, I].
    """
    found = blocks[tables.long()][:, :, :, 0]  # [G, M, 2, B, I / 2]
    return found.transpose(2, 3).flatten(3).flatten(1, 2)


def score_blocks(q: Tensor, keys: Tensor, positions: Tensor, block_len: int) -> Tensor:
    """Return the score of each block for each head: the largest product with a key up to the query's own.

    Args:
        q: [G, T, H, I], rotated.
        keys: [G, L, I]; those after a sequence's last may be anything, NaN too.
        positions: [G, T], of the queries.

    Returns:
        [G, T, H, ceil(L / block_len)] float32; negative infinity for blocks after the query's own.
    """
    num_keys = keys.shape[1]
    num_blocks = -(-num_keys // block_len)
    scores = q.new_empty(*q.shape[:3], num_blocks, dtype=torch.float32)
    wide = keys.float()
    num_tile = max(1, TILE_BYTES // (4 * q.shape[0] * q.shape[2] * num_keys))
    places = torch.arange(num_keys, device=q.device)
    for start in range(0, q.shape[1], num_tile):
        own = slice(start, start + num_tile)
        products = torch.einsum("gthd,gld->gthl", q[:, own].float(), wide)
        is_later = places > positions[:, own, None]
        products = products.masked_fill(is_later.unsqueeze(2), -torch.inf)
        padded = F.pad(products, (0, num_blocks * block_len - num_keys), value=-torch.inf)
        scores[:, own] = padded.unflatten(-1, (num_blocks, block_len)).amax(-1)
    return scores


def choose_blocks(
    scores: Tensor, positions: Tensor, block_len: int, top_k: int, num_local: int
) -> tuple[Tensor, Tensor]:
    """Return the blocks with the best scores, in order, and the number of their tokens up to the query.

    Args:
        scores: [n, H, nb]; see score_blocks.
        positions: [n], of the queries.
        num_local: blocks up to the query's own that are chosen in any case.

    Returns:
        [n, H, K] int64, the chosen blocks of each query and head, the others behind them; and [n, H] int32.
    """
    num_blocks = scores.shape[2]
    blocks, own = torch.arange(num_blocks, device=scores.device), positions[:, None] // block_len
    is_local = (blocks <= own) & (blocks > own - num_local)
    best = scores.masked_fill(is_local.unsqueeze(1), torch.inf).topk(min(top_k, num_blocks), dim=-1)
    is_chosen = best.values > -torch.inf
    chosen = best.indices.where(is_chosen, num_blocks).sort(dim=-1).values
    counts = is_chosen.sum(-1)
    # Of its own block a query sees the tokens up to itself.
    has_own = (chosen == own.unsqueeze(1)).any(-1)
    hidden = block_len - 1 - positions % block_len
    lens = counts * block_len - torch.where(has_own, hidden[:, None], 0)
    return chosen.clamp_(max=num_blocks - 1), lens.int()


def choose_pooled_blocks(
    q: Tensor, keys: Tensor, positions: Tensor, block_len: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Return the whole blocks with the best scores, then the block that the query ends, and the number of tokens.

    A score is the sum of the heads' rectified products with the block's key. The tokens behind a query's last whole
    block are chosen in any case.

    Args:
        q: [G, T, Hi, I], rotated.
        keys: [G, nb, I], one for each whole block.
        positions: [G, T], of the queries.

    Returns:
        [G T, 1, top_k + 1] int64, the chosen blocks in order, others behind them; and [G T, 1] int32.
    """
    counts, rest = (positions + 1) // block_len, (positions + 1) % block_len
    weights = torch.ones(q.shape[:3], device=q.device)
    visible = choose_entries(q, weights, keys, counts, top_k)
    num_tokens = visible.sum(-1) * block_len + rest
    visible = F.pad(visible, (0, 1)).scatter_(-1, counts.unsqueeze(-1), (rest > 0).unsqueeze(-1))
    num_blocks = visible.shape[-1]
    order = torch.arange(num_blocks, device=q.device).where(visible, num_blocks).sort(dim=-1).values
    chosen = order[..., : top_k + 1].clamp(max=num_blocks - 1)
    return chosen.flatten(0, 1).unsqueeze(1), num_tokens.flatten().unsqueeze(1).int()


def chosen_tables(
    chosen: Tensor, block_tables: Tensor, rows: Tensor, num_parts: int, parts_per_block: int
) -> Tensor:
    """Return the pieces of the cache's blocks that chosen blocks consist of.

    Args:
        chosen: [n, H, K].
        block_tables: [S, M] int32.
        rows: [n] int64, the sequence of each query.
        num_parts: pieces that a chosen block consists of.
        parts_per_block: pieces of a block of the cache.

    Returns:
        [n, H, K * num_parts] int32, in which piece i of block b is ``b * parts_per_block + i``.
    """
    parts = chosen.unsqueeze(-1) * num_parts + torch.arange(num_parts, device=chosen.device)
    parts = parts.flatten(2)
    columns = (parts // parts_per_block).clamp(max=block_tables.shape[1] - 1)
    return block_tables[rows[:, None, None], columns] * parts_per_block + (parts % parts_per_block).int()


def block_attention(
    q: Tensor, kv_cache: Tensor, tables: Tensor, lens: Tensor, scale: float, piece_len: int
) -> Tensor:
    """Compute the attention of queries to tokens that each of their KV heads has chosen.

    Args:
        q: [n, Hq, D].
        kv_cache: [N, 2, Hkv, B, D], contiguous.
        tables: [n, Hkv, M] int32, pieces of each query and KV head; see chosen_tables.
        lens: [n, Hkv] int32, tokens in these; the slots after them may be anything, NaN too.
        piece_len: tokens of a piece; divides B.

    Returns:
        [n, Hq, D].
    """
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    parts_per_block = block_size // piece_len
    # A stored piece is some of a block's keys, or values, of one head. Those of all heads' keys come before the
    # values'.
    heads = torch.arange(num_kv_heads, dtype=torch.int32, device=q.device)[:, None]
    stored = (tables // parts_per_block * (2 * num_kv_heads) + heads) * parts_per_block
    stored += tables % parts_per_block
    grouped = q.unflatten(1, (num_kv_heads, -1))
    views = has_kernels(q)
    piece_bytes = 2 * num_kv_heads * tables.shape[2] * piece_len * head_dim * q.itemsize
    num_tile = max(1, MAX_SEQUENCES // num_kv_heads if views else TILE_BYTES // piece_bytes)
    out = torch.empty_like(grouped)
    for start in range(0, len(q), num_tile):
        own = slice(start, start + num_tile)
        flat, ids = grouped[own].flatten(0, 1).contiguous(), stored[own].flatten(0, 1)
        blocks, ids = (_view_pieces if views else _gather_pieces)(kv_cache, ids, piece_len)
        attended = paged_decode_attention(flat, blocks, ids, lens[own].flatten().contiguous(), scale)
        out[own] = attended.view(out[own].shape)
    return out.flatten(1, 2)


def _view_pieces(kv_cache: Tensor, ids: Tensor, piece_len: int) -> tuple[Tensor, Tensor]:
    """Return blocks of one head, [.., 2, 1, P, D], each of which begins with a piece of the cache, and their ids."""
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    values_start = num_kv_heads * block_size * head_dim
    blocks = kv_cache.as_strided(
        ((2 * num_blocks - 1) * num_kv_heads * (block_size // piece_len), 2, 1, piece_len, head_dim),
        (piece_len * head_dim, values_start, piece_len * head_dim, head_dim, 1),
    )
    return blocks, ids


def _gather_pieces(kv_cache: Tensor, ids: Tensor, piece_len: int) -> tuple[Tensor, Tensor]:
    """As `_view_pieces`, but copies: ops on a CPU read contiguous blocks only.

    Blocks are as long as the cache's, whatever the pieces are: sums over a block have the same order then as where a
    query attends to all tokens.
    """
    num_kv_heads, block_size = kv_cache.shape[2:4]
    parts_per_block = block_size // piece_len
    ids = F.pad(ids.long(), (0, -ids.shape[1] % parts_per_block))
    stored = kv_cache.flatten(0, 3).unflatten(0, (-1, piece_len))
    flat = ids.flatten()
    pieces = torch.stack((stored[flat], stored[flat + num_kv_heads * parts_per_block]), dim=1)
    # [blocks, parts, 2, P, D] -> [blocks, 2, 1, B, D]
    blocks = pieces.unflatten(0, (-1, parts_per_block)).transpose(1, 2).flatten(2, 3).unsqueeze(2)
    num_blocks = ids.shape[1] // parts_per_block
    return blocks.contiguous(), torch.arange(len(blocks), dtype=torch.int32).view(-1, num_blocks)
