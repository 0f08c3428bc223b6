"""MlaAttention: multi-head latent attention of a decoder layer (DeepSeek-AI, *DeepSeek-V2*, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.decode_splits import DecodeSplits
from ....kernels.fused_latent_norm_rope_write import fused_latent_norm_rope_write
from ....kernels.latent_attention import (
    EXPANDED_BYTES,
    ChunkBounds,
    Expansion,
    latent_decode_attention,
    latent_prefill_attention,
)
from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.sparse_latent import SelectedTokens, slots_of, sparse_latent_attention
from ....proto.model.mla import MlaSpec
from ....proto.model.spec import DecoderSpec
from ...attention import AttentionInputs, LayerCache, TokenChoice, chunk_tokens
from ...comm.shard import Shard
from ...weights.weight_slice import WeightSlice
from ..layers import ColumnParallelLinear, PartialSum, Projection, Rotations, RowParallelLinear
from ..load_context import LoadContext
from .head_steps import TEMPERATURE
from .indexer import Indexer, index_keys

# Of the norms of latents, which configurations do not state.
_EPS = 1e-6


class MlaAttention:
    """Self-attention over the paged cache of latents.

    All ranks have the same latents, and each computes its part of the heads. With data-parallel attention a rank has
    the latents of its own sequences and computes all heads for them: the addend of each token is zero on all ranks
    but one.
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
        queries = load.head_shard(heads, sizes.qk_dim + (sizes.v_head_dim if sizes.gate == "query" else 0))
        latents = Projection(f"{name}.kv_a_proj_with_mqa", Shard(0, 1, sizes.attended_dim))
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
        self.qkv = ColumnParallelLinear(
            load, [first, latents], hidden, bias=False, shares_input=sizes.has_indexer or sizes.gate == "head"
        )
        self.gate: ColumnParallelLinear | None = None
        if sizes.gate == "head":
            gates = Projection(f"{name}.g_proj", load.head_shard(heads, 1))
            self.gate = ColumnParallelLinear(load, [gates], hidden, bias=False, shares_input=True)
        self.indexer: Indexer | None = None
        if sizes.has_indexer:
            self.indexer = Indexer(load, spec.hidden_size, sizes, f"{name}.indexer")
        self.norm = load.norm(f"{name}.kv_a_layernorm", sizes.rank).mul_(sizes.latent_scale)
        rows = load.head_shard(heads, sizes.qk_nope_head_dim + sizes.v_head_dim)
        part = WeightSlice(f"{name}.kv_b_proj", (rows.full_len, sizes.rank), 0, rows.start, len(rows))
        # [Hq, N + V, C]. Quantized checkpoints are dequantized: parts of it are multiplied from both sides.
        matrix = load.keep(f"matrix {part}", lambda: load.matrix(part))
        matrix = matrix.view(-1, sizes.qk_nope_head_dim + sizes.v_head_dim, sizes.rank)
        self.expansion = Expansion.of(matrix, sizes.qk_nope_head_dim)
        self.output = RowParallelLinear(load, f"{name}.o_proj", heads * sizes.v_head_dim, hidden, bias=False)

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
        y = self.norm.new_zeros(num_tokens + 1, self.hidden_size)
        if len(own.index):
            attended = self._attend_all(_select(x, own.index), rotations, kv_cache, inputs)
            y.index_copy_(0, own.places, self.output.forward(attended))
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
        q_latent, latents = projected[:, : -sizes.attended_dim], projected[:, -sizes.attended_dim :]
        q = q_latent
        if self.q_up is not None and self.q_norm is not None:
            stored, q_latent = q_latent, rms_norm(q_latent, self.q_norm, _EPS)
            q = self.q_up.forward(torch.cat((q_latent, stored), dim=1) if sizes.joins_latents else q_latent)
        gate: Tensor | None = None
        if sizes.gate == "query":
            heads = q.unflatten(1, (-1, sizes.qk_dim + sizes.v_head_dim))
            q, gate = heads[..., : sizes.qk_dim].contiguous(), heads[..., sizes.qk_dim :]
        else:
            q = q.unflatten(1, (-1, sizes.qk_dim))
        if self.gate is not None:
            gate = self.gate.forward(x).unsqueeze(-1)
        if sizes.temperature is not None:
            factors, _ = rotations[TEMPERATURE]
            q *= factors
        cos, sin = rotations[self.rope]
        assert cos is not None
        assert sin is not None
        keys: Tensor | None = None
        if sizes.indexer is not None:
            # A layer without an indexer has the place of a key too: the layers of a block have equal sizes.
            keys = latents.new_zeros(len(latents), sizes.indexer.head_dim)
        if self.indexer is not None:
            assert isinstance(x, Tensor)  # the input is shared
            keys = self.indexer.keys(x, cos, sin)
        fused_latent_norm_rope_write(
            q, latents, kv_cache.blocks, inputs.slot_mapping, cos, sin, self.norm, _EPS, sizes.interleaved,
            kv_cache.scales, keys,
        )  # fmt: skip
        is_sparse = self._is_sparse(kv_cache, inputs)
        if is_sparse and self.indexer is not None:
            assert isinstance(x, Tensor)
            inputs.choices[:] = [
                self.indexer.choose(
                    x, q_latent, cos, sin, index_keys(kv_cache.blocks, sizes), inputs.block_tables,
                    *inputs.tokens_as_sequences(len(q)), kv_cache.scales, self._num_absorbed(inputs, len(q)),
                )
            ]  # fmt: skip
        if is_sparse:
            attended = self._attend_chosen(q, kv_cache, inputs, inputs.choices[0])
        else:
            attended = self._attend(q, kv_cache, inputs)
        return (attended if gate is None else attended * gate.sigmoid()).flatten(1)

    def _is_sparse(self, kv_cache: LayerCache, inputs: AttentionInputs) -> bool:
        """Return whether a sequence may have more tokens than a query attends to; known without reading lengths."""
        indexer = self._sizes.indexer
        if indexer is None:
            return False
        if inputs.chunks is not None and inputs.num_decodes == 0:
            return max(inputs.chunks.seq_lens, default=0) > indexer.top_k
        return inputs.block_tables.shape[1] * kv_cache.blocks.shape[3] > indexer.top_k

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
            top_k = min(self._sizes.indexer.top_k, visible.shape[1])
            slots = slots_of(visible, inputs.block_tables, own.sequences, block_size, top_k)
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

    def _attend(self, q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs) -> Tensor:
        """Return the attention of all of the step's tokens to all earlier ones, [T, Hq, V]."""
        split = inputs.num_decodes
        tables, lens = inputs.block_tables, inputs.seq_lens
        parts: list[Tensor] = []
        if split > 0:
            decodes = kv_cache, tables[:split], lens[:split], inputs.splits
            parts.append(self._attend_absorbed(q[:split], *decodes))
        if split < q.shape[0]:
            parts.append(self._attend_chunks(q[split:], kv_cache, inputs))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if (own := inputs.generated) is not None:
            out[own.tokens] = self._attend_absorbed(q[own.tokens], kv_cache, tables[own.sequences], own.lens)
        return out

    def _attend_absorbed(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        block_tables: Tensor,
        seq_lens: Tensor,
        splits: DecodeSplits | None = None,
    ) -> Tensor:
        """Return the attention of one token per sequence, [S, Hq, V]."""
        sums = latent_decode_attention(
            self._absorb(q), self._latents(kv_cache), block_tables, seq_lens, self._sizes.scale, self._sizes.rank,
            splits, kv_cache.scales,
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
