"""MlaAttention: multi-head latent attention of a decoder layer (DeepSeek-AI, *DeepSeek-V2*, 2024)."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.fused_latent_norm_rope_write import fused_latent_norm_rope_write, rotate_last
from ....kernels.latent_attention import (
    EXPANDED_BYTES,
    ChunkBounds,
    Expansion,
    latent_decode_attention,
    latent_prefill_attention,
)
from ....kernels.norm import rms_norm
from ....kernels.paged_cache import write_kv
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.shared_attention import gather_tokens, shared_attention
from ....kernels.sparse_latent import SelectedTokens, slots_of, sparse_latent_attention
from ....proto.model.mla import MlaSpec
from ....proto.model.spec import DecoderSpec
from ...attention import AttentionInputs, LayerCache, TokenChoice, chunk_tokens
from ...comm.shard import Shard
from ...weights.weight_slice import WeightSlice
from ..layers import ColumnParallelLinear, PartialSum, Projection, Rotations, RowParallelLinear
from ..load_context import LoadContext
from .head_steps import TEMPERATURE, LearnedFactors
from .indexer import Indexer, index_keys
from .query_tiles import query_tiles


class MlaAttention:
    """Self-attention over the paged cache of latents.

    All ranks have the same latents, and each computes its part of the heads. With data-parallel attention a rank has
    the latents of its own sequences alone, and computes all heads for them, or its part of these if several ranks
    attend for the same sequences: the addend of each token is zero on all other ranks.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, sizes: MlaSpec, name: str) -> None:
        self.comm, self._batch_invariant = load.comm, load.batch_invariant
        self._reads_own = load.expert_exchange.owns_tokens
        self.max_partial_tokens = 0 if load.peers is None else load.peers.max_tokens
        if load.dp_attention:
            load = load.for_own_tokens()
        self._sizes = sizes
        self.rope: str | None = sizes.rope
        hidden, heads = spec.hidden_size, sizes.num_heads
        self.hidden_size = hidden
        # A gate that is stored with the queries follows each head's.
        qk_dim = sizes.qk_dim - sizes.unstored_dim
        queries = load.head_shard(heads, qk_dim + (sizes.v_head_dim if sizes.gate == "query" else 0))
        self._num_latents = 0 if sizes.shares_latents else sizes.attended_dim - sizes.unstored_dim
        latents = [Projection(f"{name}.kv_a_proj_with_mqa", Shard(0, 1, self._num_latents))]
        first = Projection(f"{name}.q_proj", queries)
        self.q_norm: Tensor | None = None
        self.q_up: ColumnParallelLinear | None = None
        if sizes.query_rank is not None:
            first = Projection(f"{name}.q_a_proj", Shard(0, 1, sizes.query_rank))
            self.q_norm = load.norm(f"{name}.q_a_layernorm", sizes.query_rank)
            rank = 2 * sizes.query_rank if sizes.joins_latents else sizes.query_rank
            self.q_up = ColumnParallelLinear(
                load, [Projection(f"{name}.q_b_proj", queries)], rank, bias=False
            )
        # The queries, or their latents, then the latents of keys and values.
        gates = {
            "head": Projection(f"{name}.g_proj", load.head_shard(heads, 1)),
            "value": Projection(f"{name}.gate_proj", load.head_shard(heads, sizes.v_head_dim)),
        }.get(sizes.gate or "")
        self.qkv = ColumnParallelLinear(
            load,
            [first, *([] if sizes.shares_latents else latents)],
            hidden,
            bias=False,
            shares_input=sizes.has_indexer or gates is not None,
        )
        self.gate: ColumnParallelLinear | None = None
        if gates is not None:
            self.gate = ColumnParallelLinear(load, [gates], hidden, bias=False, shares_input=True)
        self.indexer: Indexer | None = None
        if sizes.has_indexer:
            self.indexer = self.make_indexer(load, spec.hidden_size, sizes, f"{name}.indexer")
        self.norm: Tensor | None = None
        if not sizes.shares_latents:
            self.norm = load.norm(f"{name}.kv_a_layernorm", sizes.rank).mul_(sizes.latent_scale)
        self._factors: LearnedFactors | None = None
        if sizes.has_query_factors:
            self._factors = LearnedFactors(load, f"{name}.softmax_scaling", load.head_shard(heads, 1))
        rows = load.head_shard(heads, sizes.qk_nope_head_dim + sizes.v_head_dim)
        part = WeightSlice(f"{name}.kv_b_proj", (rows.full_len, sizes.rank), 0, rows.start, len(rows))
        # [Hq, N + V, C]. Quantized checkpoints are dequantized: parts of it are multiplied from both sides.
        matrix = load.keep(f"matrix {part}", lambda: load.matrix(part))
        matrix = matrix.view(-1, sizes.qk_nope_head_dim + sizes.v_head_dim, sizes.rank)
        self.expansion = Expansion.of(matrix, sizes.qk_nope_head_dim)
        self.sinks: Tensor | None = None
        if sizes.has_sinks:
            self.sinks = load.part(f"{name}.sinks", load.head_shard(heads, 1)).float()
        self.output = RowParallelLinear(load, f"{name}.o_proj", heads * sizes.v_head_dim, hidden, bias=False)

    def make_indexer(self, load: LoadContext, hidden_size: int, sizes: MlaSpec, name: str) -> Indexer:
        """Return the indexer of the layer."""
        return Indexer(load, hidden_size, sizes, name)

    def index_keys(
        self, indexer: Indexer, x: Tensor, cos: Tensor, sin: Tensor, inputs: AttentionInputs
    ) -> Tensor | None:
        """Return the indexer's keys of tokens [T, I] to cache behind latents; None if they are cached elsewhere."""
        return indexer.keys(x, cos, sin)

    def forward(
        self,
        x: Tensor | Float8Tokens,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]; writes the tokens' latents to the cache before attention reads them."""
        own = inputs.own_tokens
        num_tokens = len(x.codes) if isinstance(x, Float8Tokens) else len(x)
        if own is None or (self._reads_own and num_tokens):  # x has the tokens to attend for alone
            return self.output.forward_partial(self._attend_all(x, rotations, kv_cache, inputs))
        # The results of padding go behind those of all tokens.
        y = self.expansion.matrix.new_zeros(num_tokens + 1, self.hidden_size)
        if len(own.index):
            attended = self._attend_all(_select(x, own.index), rotations, kv_cache, inputs)
            y.index_copy_(0, own.places, self.output.multiply(attended))
        y = y[:num_tokens]
        if self._reads_own:
            return y
        return PartialSum(y) if num_tokens <= self.max_partial_tokens else self.comm.all_reduce(y)

    def _attend_all(
        self,
        x: Tensor | Float8Tokens,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        """[T, E] -> [T, Hq * V]"""
        sizes, projected = self._sizes, self.qkv.forward(x)
        num_queries = projected.shape[1] - self._num_latents
        q_latent, latents = projected[:, :num_queries], projected[:, num_queries:]
        q = q_latent
        if self.q_up is not None and self.q_norm is not None:
            stored, q_latent = q_latent, rms_norm(q_latent, self.q_norm, sizes.norm_eps)
            q = self.q_up.forward(torch.cat((q_latent, stored), dim=1) if sizes.joins_latents else q_latent)
        gate: Tensor | None = None
        if sizes.gate == "query":
            heads = q.unflatten(1, (-1, sizes.qk_dim + sizes.v_head_dim))
            q, gate = heads[..., : sizes.qk_dim].contiguous(), heads[..., sizes.qk_dim :]
        else:
            q = q.unflatten(1, (-1, sizes.qk_dim - sizes.unstored_dim))
        if sizes.unstored_dim:
            q = F.pad(q, (0, sizes.unstored_dim))
        if self.gate is not None:
            gate = self.gate.forward(x).unflatten(1, (q.shape[1], -1))
        if sizes.temperature is not None:
            factors, _ = rotations[TEMPERATURE]
            assert factors is not None
            q *= factors
        if self._factors is not None:
            self._factors.apply(q, rotations)
        self._rotate_and_write(x, q, latents, rotations, kv_cache, inputs)
        is_sparse = self._is_sparse(kv_cache, inputs)
        if is_sparse and self.indexer is not None:
            assert isinstance(x, Tensor)
            num_selected = 0 if sizes.has_sinks else self._num_absorbed(inputs, len(q))
            inputs.choices[:] = [self.indexer.choose(x, q_latent, rotations, kv_cache, inputs, num_selected)]
        if self.sinks is not None:
            chosen = inputs.choices[0].visible if is_sparse else None
            attended = self._attend_with_sinks(q, kv_cache, inputs, self.sinks, chosen)
        elif is_sparse:
            attended = self._attend_chosen(q, kv_cache, inputs, inputs.choices[0])
        else:
            attended = self._attend(q, kv_cache, inputs)
        return (attended if gate is None else attended * gate.sigmoid()).flatten(1)

    def _rotate_and_write(
        self,
        x: Tensor | Float8Tokens,
        q: Tensor,
        latents: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> None:
        """Rotate the queries in place, and write what the layer caches of its tokens: latents, and indexers' keys."""
        sizes, slots = self._sizes, inputs.slot_mapping
        keys: Tensor | None = None
        cos, sin = rotations[self.rope]
        assert cos is not None
        assert sin is not None
        if self.indexer is not None:
            assert isinstance(x, Tensor)  # the input is shared
            keys = self.index_keys(self.indexer, x, cos, sin, inputs)
        if self.norm is None:
            rotate_last(q, cos, sin, sizes.interleaved)
            if keys is not None:
                write_kv(keys[:, None, None], index_keys(kv_cache.blocks, sizes), slots)
            return
        if sizes.indexer is not None and sizes.num_index_keys:
            # Keys of indexers have a place, too, if no layer, or a later one, writes them: the layers of a block have
            # equal sizes.
            width = sizes.num_index_keys * sizes.indexer.head_dim
            if keys is None:
                keys = latents.new_zeros(len(latents), width)
            elif keys.shape[1] < width:
                keys = F.pad(keys, (0, width - keys.shape[1]))
        if sizes.unstored_dim:
            latents = F.pad(latents, (0, sizes.unstored_dim))
        fused_latent_norm_rope_write(
            q, latents, kv_cache.blocks, slots, cos, sin, self.norm, sizes.norm_eps, sizes.interleaved,
            kv_cache.scales, keys,
        )  # fmt: skip

    def _is_sparse(self, kv_cache: LayerCache, inputs: AttentionInputs) -> bool:
        """Return whether a sequence may have more tokens than a query attends to; known without reading lengths."""
        indexer = self._sizes.indexer
        if indexer is None:
            return False
        if inputs.chunks is not None and inputs.num_decodes == 0:
            return max(inputs.chunks.seq_lens, default=0) > indexer.num_attended
        return inputs.block_tables.shape[1] * kv_cache.blocks.shape[3] > indexer.num_attended

    def _num_absorbed(self, inputs: AttentionInputs, num_tokens: int) -> int:
        """Return the number of first tokens that attend to latents, if attention is sparse."""
        bounds = inputs.chunks
        return inputs.num_decodes if bounds is not None and self._expands(bounds) else num_tokens

    def _expands(self, bounds: ChunkBounds) -> bool:
        """Return whether chunks are expanded.

        Which way is cheaper depends on the whole batch. Batch-invariant chunks are always expanded, however short.
        """
        return self._batch_invariant or self._sizes.expansion_is_cheaper(*bounds)

    def _attend_chosen(
        self, q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs, choice: TokenChoice
    ) -> Tensor:
        """Return the attention of all of the step's tokens to chosen ones, [T, Hq, V]."""
        split, parts = len(q) if choice.visible is None else inputs.num_decodes, list[Tensor]()
        if choice.selected is not None:
            parts.append(self._attend_selected(q[:split], kv_cache, choice.selected))
        if choice.visible is not None:
            assert inputs.chunks is not None
            parts.append(self._attend_expanded(q[split:], kv_cache, inputs, inputs.chunks, choice.visible))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if (own := inputs.generated) is not None and choice.visible is not None:
            assert self._sizes.indexer is not None
            visible, block_size = choice.visible[own.tokens - split], kv_cache.blocks.shape[3]
            most = min(self._sizes.indexer.num_attended, visible.shape[1])
            slots = slots_of(visible, inputs.block_tables, own.sequences, block_size, most)
            out[own.tokens] = self._attend_selected(q[own.tokens], kv_cache, slots)
        return out

    def _attend_selected(self, q: Tensor, kv_cache: LayerCache, selected: SelectedTokens) -> Tensor:
        """Return the absorbed attention of tokens to selected ones, [T, Hq, V]."""
        num_heads, sizes = q.shape[1], self._sizes
        token_bytes = (2 * num_heads + selected.slots.shape[1]) * sizes.attended_dim * q.itemsize
        num_tile = max(1, EXPANDED_BYTES // token_bytes)
        out = q.new_empty(len(q), num_heads, sizes.v_head_dim)
        for start in range(0, len(q), num_tile):
            own = slice(start, start + num_tile)
            sums = sparse_latent_attention(
                self._absorb(q[own]), self._latents(kv_cache), selected.slots[own], selected.counts[own],
                self._sizes.scale, sizes.rank, kv_cache.scales,
            )  # fmt: skip
            out[own] = self.expansion.expand(sums)
        return out

    def _latents(self, kv_cache: LayerCache) -> Tensor:
        """Return the part of the cache that queries attend to, [N, 1, 1, B, C + R]."""
        return kv_cache.blocks[..., : self._sizes.attended_dim]

    def _absorb(self, q: Tensor) -> Tensor:
        """Return queries of latents, [T, Hq, N + R] -> [T, Hq, C + R]."""
        qk_nope_head_dim = self._sizes.qk_nope_head_dim
        absorbed = self.expansion.absorb(q[..., :qk_nope_head_dim])
        return torch.cat((absorbed, q[..., qk_nope_head_dim:]), dim=-1)

    def _attend_with_sinks(
        self, q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs, sinks: Tensor, chosen: Tensor | None
    ) -> Tensor:
        """Return the absorbed attention of all of the step's tokens, with sinks, [T, Hq, V].

        Args:
            chosen: [T, L] bool, the tokens that each query attends to; None for all up to its own.
        """
        sums = q.new_empty(*q.shape[:2], self._sizes.rank)
        absorbed, latents = self._absorb(q), self._latents(kv_cache)
        for tile in query_tiles(inputs, latents.shape[3]):
            cached = torch.arange(tile.length, device=q.device)
            positions = cached.expand(len(tile.sequences), -1)
            keys = gather_tokens(latents, inputs.block_tables[tile.sequences], positions)
            visible = cached <= tile.positions.unsqueeze(-1)
            if chosen is not None:
                own = chosen[tile.tokens, : tile.length]
                visible = visible & own.unflatten(0, tile.positions.shape)
            queries = absorbed[tile.tokens].unflatten(0, tile.positions.shape)
            attended = shared_attention(queries, keys, visible, sinks, self._sizes.scale, self._sizes.rank)
            sums[tile.tokens] = attended.flatten(0, 1)
        return self.expansion.expand(sums)

    def _attend(self, q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs) -> Tensor:
        """Return the attention of all of the step's tokens to all earlier ones, [T, Hq, V]."""
        split, parts = inputs.num_decodes, list[Tensor]()
        if split > 0:
            latents = replace(kv_cache, blocks=self._latents(kv_cache))
            sums = inputs.library.decode_latents(
                self._absorb(q[:split]), latents, inputs, self._sizes.scale, self._sizes.rank
            )
            parts.append(self.expansion.expand(sums))
        if split < q.shape[0]:
            parts.append(self._attend_chunks(q[split:], kv_cache, inputs))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if (own := inputs.generated) is not None:
            out[own.tokens] = self._attend_absorbed(
                q[own.tokens], kv_cache, inputs.block_tables[own.sequences], own.lens
            )
        return out

    def _attend_absorbed(
        self, q: Tensor, kv_cache: LayerCache, block_tables: Tensor, seq_lens: Tensor
    ) -> Tensor:
        """Return the attention of single tokens of chunks, [S, Hq, V]."""
        sums = latent_decode_attention(
            self._absorb(q), self._latents(kv_cache), block_tables, seq_lens, self._sizes.scale, self._sizes.rank,
            None, kv_cache.scales,
        )  # fmt: skip
        return self.expansion.expand(sums)

    def _attend_chunks(self, q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs) -> Tensor:
        """Return the attention of chunks, [T, Hq, V]."""
        bounds = inputs.chunks
        if bounds is not None and self._expands(bounds):
            return self._attend_expanded(q, kv_cache, inputs, bounds)
        # Each token is a sequence of its own, which ends with it.
        split = inputs.num_decodes
        chunk, lens = chunk_tokens(inputs.query_start, inputs.seq_lens[split:], len(q))
        return self._attend_absorbed(q, kv_cache, inputs.block_tables[split:].index_select(0, chunk), lens)

    def _attend_expanded(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        bounds: ChunkBounds,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of chunks with their keys and values in full, [T, Hq, V]."""
        split = inputs.num_decodes
        return latent_prefill_attention(
            q, self._latents(kv_cache), inputs.block_tables[split:], inputs.query_start, inputs.seq_lens[split:],
            bounds, self._sizes.scale, self.expansion, kv_cache.scales, visible,
        )  # fmt: skip


def _select(x: Tensor | Float8Tokens, tokens: Tensor) -> Tensor | Float8Tokens:
    if isinstance(x, Float8Tokens):
        return Float8Tokens(x.codes.index_select(0, tokens), x.scales.index_select(0, tokens), x.dtype)
    return x.index_select(0, tokens)
