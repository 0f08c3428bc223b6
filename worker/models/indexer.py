"""Indexer: chooses the tokens that a query of sparse latent attention attends to (kernels.sparse_latent)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.rope import apply_rope
from ...kernels.sparse_latent import SCORE_BYTES, SelectedTokens, index_scores, select_top_tokens
from ..comm.shard import Shard
from .layers import ColumnParallelLinear, LayerNorm, Projection
from .load_context import LoadContext
from .spec import DecoderSpec, IndexerSpec, LatentSpec

# Of the norm of keys, which configurations do not state.
_EPS = 1e-6


class Indexer:
    """The indexer of a layer; every rank computes all of its heads, and so chooses the same tokens."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, sizes: IndexerSpec, name: str) -> None:
        assert spec.latent is not None
        assert spec.latent.query_rank is not None
        self._sizes = sizes
        queries = Projection(f"{name}.wq_b", Shard(0, 1, sizes.num_heads * sizes.head_dim))
        self._queries = ColumnParallelLinear(load, [queries], spec.latent.query_rank, bias=False)
        keys = Projection(f"{name}.wk", Shard(0, 1, sizes.head_dim))
        self._keys = ColumnParallelLinear(load, [keys], spec.hidden_size, bias=False)
        self._norm = LayerNorm(
            load.norm(f"{name}.k_norm", sizes.head_dim),
            load.replicated(f"{name}.k_norm.bias", sizes.head_dim),
            _EPS,
        )
        shape = sizes.num_heads, spec.hidden_size
        self._weights = torch.empty(shape, dtype=torch.float32, device=load.device)
        load.checkpoint.read_into(self._weights, f"{name}.weights_proj.weight", shape)
        # Of the mean over heads, and of the products.
        self._weights *= (sizes.num_heads * sizes.head_dim) ** -0.5

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the keys of tokens, [T, E] -> [T, I]."""
        keys = self._norm.apply(self._keys.forward(x)).unsqueeze(1)
        self._rotate(keys, cos, sin)
        return keys.squeeze(1)

    def select(
        self,
        x: Tensor,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        block_tables: Tensor,
        rows: Tensor,
        lens: Tensor,
        scales: Tensor | None,
    ) -> SelectedTokens:
        """Return the tokens that each of the T tokens attends to.

        Args:
            x: [T, E].
            q_latent: [T, query_rank], normalized.
            cos, sin: [T, R], as for kernels.rope.apply_rope.
            keys: [N, 1, 1, B, I], the part of the cache with the keys.
            block_tables, rows, lens, scales: as for index_scores.
        """
        q = self._queries.forward(q_latent).unflatten(1, (-1, self._sizes.head_dim))
        self._rotate(q, cos, sin)
        weights = F.linear(x.float(), self._weights)
        block_size = keys.shape[3]
        parts: list[SelectedTokens] = []
        num_tile = max(1, SCORE_BYTES // (4 * block_tables.shape[1] * block_size))
        for start in range(0, len(q), num_tile):
            own = slice(start, start + num_tile)
            scores = index_scores(q[own], weights[own], keys, block_tables, rows[own], lens[own], scales)
            parts.append(
                select_top_tokens(scores, block_tables, rows[own], lens[own], block_size, self._sizes.top_k)
            )
        if len(parts) == 1:
            return parts[0]
        return SelectedTokens(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first R numbers of each head in place, [T, Hi, I]."""
        if self._sizes.interleaved:
            rotated = x[..., : cos.shape[1]]
            rotated.copy_(rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))
        apply_rope(x, cos, sin)


def index_keys(latents: Tensor, sizes: LatentSpec) -> Tensor:
    """Return the part of a latent cache with the keys of indexers, [N, 1, 1, B, I]."""
    return latents[..., sizes.attended_dim :]
