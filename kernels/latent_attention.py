"""Multi-head latent attention over a paged cache of latents (DeepSeek-AI, *DeepSeek-V2*, 2024).

A token is cached as one vector of D = C + R numbers: its normalized latent [C], from which each head's key and value
follow by a matrix, and a rotated key [R] that all heads share. The cache is ``[N, 1, 1, B, D]``, the same on every
rank; it may be a part of wider rows (kernels.sparse_latent). There are two ways to compute the same attention:

- *absorbed*: the matrix of the keys is applied to the query instead, and that of the values to the weighted sum of
  latents. All heads then attend to the latents themselves, which are read once. A query costs 2 (C + D) products per
  head and token instead of 2 (N + R + V). For decoding.
- *expanded*: the keys and values of all heads are computed from the latents, N + V numbers per head and token.
  For chunks, whose queries share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_variant import PLAIN
from .decode_splits import DecodeSplits
from .dispatch import on_gpu
from .linear import PackedHeads, linear_heads, pack_heads
from .native import ops as cpu
from .quantized_kv import dequantize

# Expanded keys and values at a time, except that one head of one sequence is never divided.
EXPANDED_BYTES = 512 << 20
# Queries of a chunk per tile of the PyTorch reference.
QUERY_TILE_LEN = 128


class ChunkBounds(NamedTuple):
    """Lengths of a step's chunks, known on the host.

    Attributes:
        query_lens: tokens of each chunk.
        seq_lens: tokens of each sequence, its chunk included.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Expansion:
    """The matrices that make a head's key [N] and value [V] from a latent [C].

    Attributes:
        matrix: [Hq, N + V, C].
        keys, values: [Hq, N, C] and [Hq, V, C].
        columns: [Hq, C, N], the transpose of the keys'.
    """

    matrix: Tensor
    keys: PackedHeads
    values: PackedHeads
    columns: PackedHeads

    @staticmethod
    def of(matrix: Tensor, key_dim: int) -> Expansion:
        """Return the matrices of a matrix [Hq, N + V, C], whose first `key_dim` rows make keys."""
        keys, values = matrix[:, :key_dim], matrix[:, key_dim:]
        return Expansion(matrix, pack_heads(keys), pack_heads(values), pack_heads(keys.mT))

    def absorb(self, q: Tensor) -> Tensor:
        """Return queries of latents from queries of keys, [T, Hq, N] -> [T, Hq, C]."""
        return linear_heads(q, self.columns)

    def expand(self, sums: Tensor) -> Tensor:
        """Return sums of values from those of latents, [T, Hq, C] -> [T, Hq, V]."""
        return linear_heads(sums, self.values)


@on_gpu("latent_decode")
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
    """Compute the absorbed attention of one new token per sequence.

    Args:
        q: [S, Hq, D], the queries of the latents [C], then those of the shared keys [R].
        latents: [N, 1, 1, B, D], the new tokens' latents included.
        block_tables: [S, M] int32; entries past a sequence's blocks are ignored.
        seq_lens: [S] int32, the new token included; 0 for padding, whose output is undefined.
        value_dim: C.
        splits: work items on a GPU; None: computed here.
        scales: [N, 1, 1, B] float32, scales of a quantized cache (see kernels.quantized_kv).

    Returns:
        [S, Hq, C], the weighted sums of latents.
    """
    if cpu.supports_rows(q, latents, value_dim):
        return cpu.latent_decode_attention(q, latents, block_tables, seq_lens, scale, value_dim, scales)
    out = q.new_zeros(*q.shape[:2], value_dim)
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            keys = gather_latents(latents, block_tables[row], 0, length, scales, q.dtype)
            weights = (q[row].float() @ keys.float().mT * scale).softmax(dim=-1)
            out[row] = (weights @ keys[:, :value_dim].float()).to(q.dtype)
    return out


@on_gpu("latent_prefill")
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
    """Compute the expanded causal attention of each sequence's last tokens, cached prefix included.

    Args:
        q: [T, Hq, N + R], the queries of the expanded keys [N], then those of the shared keys [R].
        latents: [N, 1, 1, B, D], the chunks' own latents included.
        block_tables: [S, M] int32; entries past a sequence's blocks are ignored.
        query_start: [S + 1] int32; sequence s has queries ``query_start[s]:query_start[s + 1]``.
        seq_lens: [S] int32, the chunk included.
        bounds: the same lengths on the host.
        scales: as for latent_decode_attention.
        visible: [T, L] bool, the tokens of its sequence that each query attends to, among those up to its own; at
            least one. None for all.

    Returns:
        [T, Hq, V].
    """
    num_heads, value_dim, _ = expansion.values.shape
    out = q.new_empty(q.shape[0], num_heads, value_dim)
    # The next head_dim of a C++ op, if there is one.
    head_dim = cpu.attention_dim(q.shape[2]) or q.shape[2]
    q = F.pad(q, (0, head_dim - q.shape[2])) if q.is_cpu and head_dim > q.shape[2] else q
    starts = pairwise(accumulate(bounds.query_lens, initial=0))
    for row, ((start, end), length) in enumerate(zip(starts, bounds.seq_lens, strict=True)):
        if end == start:
            continue
        cached = gather_latents(latents, block_tables[row], 0, length, scales, q.dtype)
        own_visible = None if visible is None else visible[start:end]
        for heads in head_groups(num_heads, length * 2 * q.shape[2] * q.itemsize):
            keys_values = _expand(
                cached, expansion.keys.part(heads), expansion.values.part(heads), q.shape[2]
            )
            _attend_chunk(q[start:end, heads], keys_values, scale, own_visible, out[start:end, heads])
    return out


def head_groups(num_heads: int, head_bytes: int) -> list[slice]:
    """Split the heads into equal groups of EXPANDED_BYTES at most, of one head at least."""
    num_groups = min(num_heads, -(-num_heads * head_bytes // EXPANDED_BYTES))
    width = -(-num_heads // num_groups)
    return [slice(start, min(start + width, num_heads)) for start in range(0, num_heads, width)]


def gather_latents(
    latents: Tensor, block_table: Tensor, start: int, end: int, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the latents of a sequence's tokens `start` to `end`, [L, D]."""
    block_size = latents.shape[3]
    first = start // block_size
    ids = block_table[first : -(-end // block_size)].long()
    own = slice(start - first * block_size, end - first * block_size)
    gathered = latents[ids, 0, 0].flatten(0, 1)[own]
    if scales is None:
        return gathered
    return dequantize(gathered, scales[ids, 0, 0].flatten()[own], dtype)


def _expand(cached: Tensor, to_keys: PackedHeads, to_values: PackedHeads, head_dim: int) -> Tensor:
    """Return keys and values as a cache of one block, [1, 2, Hq, L, head_dim], padded with zeros."""
    num_heads, key_dim, latent_dim = to_keys.shape
    own = cached[:, None, :latent_dim].expand(-1, num_heads, -1)
    both = cached.new_zeros(1, 2, num_heads, len(cached), head_dim)
    keys, values = both[0]
    keys[..., :key_dim] = linear_heads(own, to_keys).transpose(0, 1)
    keys[..., key_dim : key_dim + cached.shape[1] - latent_dim] = cached[:, latent_dim:]
    values[..., : to_values.shape[1]] = linear_heads(own, to_values).transpose(0, 1)
    return both


def _attend_chunk(q: Tensor, keys_values: Tensor, scale: float, visible: Tensor | None, out: Tensor) -> None:
    """Compute the causal attention of the last tokens of one sequence into `out`.

    Args:
        q: [n, Hq, N + R].
        keys_values: [1, 2, Hq, L, N + R], of the whole sequence.
        visible: [n, L or more] bool, keys that a query may attend to; None for all.
        out: [n, Hq, V].
    """
    num_queries, num_keys = q.shape[0], keys_values.shape[3]
    if cpu.supports_attention(q, keys_values):
        table, bounds, length = (
            torch.tensor(numbers, dtype=torch.int32) for numbers in ([[0]], [0, num_queries], [num_keys])
        )
        attended = cpu.paged_prefill_attention(
            q, keys_values, table, bounds, length, scale, PLAIN, None, visible
        )
        out.copy_(attended[..., : out.shape[2]])
        return
    keys, values = keys_values[0]
    for start in range(0, num_queries, QUERY_TILE_LEN):
        end = min(start + QUERY_TILE_LEN, num_queries)
        first = num_keys - num_queries
        positions = torch.arange(first + start, first + end, device=q.device)
        mask = torch.arange(num_keys, device=q.device) <= positions[:, None]
        if visible is not None:
            mask &= visible[start:end, :num_keys]
        tile = q[start:end].transpose(0, 1)
        attended = F.scaled_dot_product_attention(tile, keys, values, attn_mask=mask, scale=scale)
        out[start:end] = attended[..., : out.shape[2]].transpose(0, 1)
