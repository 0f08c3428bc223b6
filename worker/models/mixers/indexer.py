"""Indexer: chooses the tokens that a query of sparse latent attention attends to (kernels.sparse_latent)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.linear import linear, pack
from ....kernels.rope import apply_rope
from ....kernels.sparse_latent import (
    SCORE_BYTES,
    SelectedTokens,
    choose_tokens,
    index_scores,
    slots_of,
)
from ....proto.model.mla import MlaSpec
from ...attention import AttentionInputs, LayerCache, TokenChoice
from ...comm.shard import Shard
from ...weights.weight_slice import WeightSlice
from ..layers import ColumnParallelLinear, LayerNorm, Projection, Rotations
from ..load_context import LoadContext
from .head_steps import LearnedFactors


class Indexer:
    """The indexer of a layer; every rank computes all of its heads, and so chooses the same tokens."""

    def __init__(self, load: LoadContext, hidden_size: int, mla: MlaSpec, name: str) -> None:
        assert mla.indexer is not None
        self._mla, sizes = mla, mla.indexer
        self._sizes = sizes
        self._input_norm: LayerNorm | None = None
        self._factors: LearnedFactors | None = None
        in_features = mla.query_rank
        if sizes.reads_hidden:
            in_features = hidden_size
            self._input_norm = _layer_norm(load, f"{name}.q_input_norm", hidden_size, sizes.norm_eps)
            self._factors = LearnedFactors(load, f"{name}.softmax_scaling", Shard(0, 1, sizes.num_heads))
        assert in_features is not None
        queries = Projection(f"{name}.wq_b", Shard(0, 1, sizes.num_heads * sizes.head_dim))
        self._queries = ColumnParallelLinear(load, [queries], in_features, bias=False)
        keys = Projection(f"{name}.wk", Shard(0, 1, sizes.head_dim))
        self._keys = ColumnParallelLinear(load, [keys], hidden_size, bias=False)
        self._norm = _layer_norm(load, f"{name}.k_norm", sizes.head_dim, sizes.norm_eps)
        shape = sizes.num_heads, hidden_size
        weights = load.matrix(WeightSlice(f"{name}.weights_proj", shape, 0, 0, shape[0]), torch.float32)
        # Of the mean over heads, and of the products.
        self._weights = pack(weights.mul_((sizes.num_heads * sizes.head_dim) ** -0.5))

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the keys of tokens, [T, E] -> [T, I]."""
        keys = self._norm.apply(self._keys.forward(x)).unsqueeze(1)
        self._rotate(keys, cos, sin)
        return keys.squeeze(1)

    def choose(
        self,
        x: Tensor,
        q_latent: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        num_selected: int,
    ) -> TokenChoice:
        """Return the tokens that each of the T tokens attends to.

        Args:
            x: [T, E].
            q_latent: [T, query_rank], normalized.
            kv_cache: of the layer, with the keys of the step's tokens.
            num_selected: the first tokens, whose choice are slots; that of the others is a mask.
        """
        q, weights = self._project(x, q_latent, rotations), linear(x.float(), self._weights)
        rows, lens = inputs.tokens_as_sequences(len(q))
        tables, block_size = inputs.block_tables, kv_cache.blocks.shape[3]
        width = tables.shape[1] * block_size
        most = min(self._sizes.num_attended, width)

        def mark(own: slice) -> Tensor:
            return self._mark(q[own], weights[own], rows[own], lens[own], kv_cache, inputs)

        def select(own: slice) -> SelectedTokens:
            return slots_of(mark(own), tables, rows[own], block_size, most)

        num_tile = max(1, SCORE_BYTES // (4 * width))
        selected = [select(own) for own in _tiles(0, num_selected, num_tile)]
        masks = [mark(own) for own in _tiles(num_selected, len(q), num_tile)]
        return TokenChoice(
            SelectedTokens(*(_cat(tensors) for tensors in zip(*selected, strict=True))) if selected else None,
            _cat(masks) if masks else None,
        )

    def _project(self, x: Tensor, q_latent: Tensor, rotations: Rotations) -> Tensor:
        """Return the queries of tokens, [T, Hi, I]."""
        read = q_latent if self._input_norm is None else self._input_norm.apply(x)
        q: Tensor = self._queries.forward(read).unflatten(1, (-1, self._sizes.head_dim))
        if self._factors is not None:
            self._factors.apply(q, rotations)
        cos, sin = rotations[self._mla.rope]
        assert cos is not None
        assert sin is not None
        self._rotate(q, cos, sin)
        return q

    def _mark(
        self,
        q: Tensor,
        weights: Tensor,
        rows: Tensor,
        lens: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        """Return which tokens of its sequence each query attends to, [n, M * B] bool.

        Args:
            q: [n, Hi, I].
            weights: [n, Hi] float32, of the heads.
            rows, lens: as for index_scores.
        """
        keys, top_k = index_keys(kv_cache.blocks, self._mla), self._sizes.top_k
        scores = index_scores(q, weights, keys, inputs.block_tables, rows, lens, top_k, kv_cache.scales)
        return choose_tokens(scores, lens, top_k)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first or the last R elements of each head in place, [T, Hi, I]."""
        if self._sizes.rotates_last:
            last = x[..., -cos.shape[1] :].contiguous()
            apply_rope(last, cos, sin)
            x[..., -cos.shape[1] :] = last
            return
        if self._sizes.interleaved:
            rotated = x[..., : cos.shape[1]]
            rotated.copy_(rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))
        apply_rope(x, cos, sin)


def index_keys(latents: Tensor, sizes: MlaSpec) -> Tensor:
    """Return the part of a latent cache with the keys of a layer's indexer, [N, 1, 1, B, I]."""
    assert sizes.indexer is not None
    dim = sizes.indexer.head_dim
    start = sizes.attended_dim + sizes.index_place * dim
    return latents[..., start : start + dim]


def _layer_norm(load: LoadContext, name: str, size: int, eps: float) -> LayerNorm:
    return LayerNorm(load.norm(name, size), load.replicated(f"{name}.bias", size), eps)


def _tiles(start: int, end: int, num_tile: int) -> list[slice]:
    return [slice(first, min(first + num_tile, end)) for first in range(start, end, num_tile)]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
