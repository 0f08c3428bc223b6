"""LatentAttention: multi-head latent attention of a decoder layer (DeepSeek-AI, *DeepSeek-V2*, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.all_reduce_norm import Peers
from ...kernels.decode_splits import DecodeSplits
from ...kernels.fused_latent_norm_rope_write import fused_latent_norm_rope_write
from ...kernels.latent_attention import ChunkBounds, latent_decode_attention, latent_prefill_attention
from ...kernels.norm import rms_norm
from ...kernels.quantized_linear import Float8Tokens
from ..attention import AttentionInputs, LayerCache
from ..comm.shard import Shard
from ..weights.weight_slice import WeightSlice
from .layers import ColumnParallelLinear, PartialSum, Projection, Rotations, RowParallelLinear
from .load_context import LoadContext
from .spec import DecoderSpec, LayerSpec

# Of the norms of latents, which configurations do not state.
_EPS = 1e-6


class LatentAttention:
    """Self-attention over the paged cache of latents.

    All ranks have the same latents, and each computes its part of the heads. With data-parallel attention a rank has
    the latents of its own sequences and computes all heads for them: the addend of each token is zero on all ranks
    but one.
    """

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str, peers: Peers | None
    ) -> None:
        assert spec.latent is not None
        assert layer.rope is not None
        self.comm = load.comm
        self.max_partial_tokens = 0 if peers is None else peers.max_tokens
        if load.dp_attention:
            load, peers = load.of_one_rank(), None
        sizes = self._sizes = spec.latent
        self.scale = spec.attention_scale
        self.rope = layer.rope
        hidden, heads = spec.hidden_size, spec.num_heads
        self.hidden_size = hidden
        queries = load.head_shard(heads, sizes.qk_dim)
        latents = Projection(f"{name}.kv_a_proj_with_mqa", Shard(0, 1, sizes.cached_dim))
        first = Projection(f"{name}.q_proj", queries)
        self.q_norm: Tensor | None = None
        self.q_up: ColumnParallelLinear | None = None
        if sizes.query_rank is not None:
            first = Projection(f"{name}.q_a_proj", Shard(0, 1, sizes.query_rank))
            self.q_norm = load.norm(f"{name}.q_a_layernorm", sizes.query_rank)
            self.q_up = ColumnParallelLinear(
                load, [Projection(f"{name}.q_b_proj", queries)], sizes.query_rank, bias=False
            )
        # The queries, or their latents, then the latents of keys and values.
        self.qkv = ColumnParallelLinear(load, [first, latents], hidden, bias=False)
        self.norm = load.norm(f"{name}.kv_a_layernorm", sizes.rank)
        rows = load.head_shard(heads, sizes.key_dim + sizes.value_dim)
        part = WeightSlice(f"{name}.kv_b_proj", (rows.full_len, sizes.rank), 0, rows.start, len(rows))
        # [Hq, N + V, C]. Quantized checkpoints are dequantized: parts of it are multiplied from both sides.
        expansion = load.keep(f"matrix {part}", lambda: load.matrix(part))
        self.expansion = expansion.view(-1, sizes.key_dim + sizes.value_dim, sizes.rank)
        self.output = RowParallelLinear(
            load, f"{name}.o_proj", heads * sizes.value_dim, hidden, bias=False, peers=peers
        )

    def forward(
        self,
        x: Tensor | Float8Tokens,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]; writes the tokens' latents to the cache before attention reads them."""
        own = inputs.own_tokens
        if own is None:
            return self.output.forward_partial(self._attend_all(x, rotations, kv_cache, inputs))
        num_tokens = len(x.codes) if isinstance(x, Float8Tokens) else len(x)
        # The results of padding go behind those of all tokens.
        y = self.norm.new_zeros(num_tokens + 1, self.hidden_size)
        if len(own.index):
            attended = self._attend_all(_select(x, own.index), rotations, kv_cache, inputs)
            y.index_copy_(0, own.places, self.output.forward(attended))
        y = y[:num_tokens]
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
        q, latents = projected[:, : -sizes.cached_dim], projected[:, -sizes.cached_dim :]
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up.forward(rms_norm(q, self.q_norm, _EPS))
        q = q.unflatten(1, (-1, sizes.qk_dim))
        cos, sin = rotations[self.rope]
        assert cos is not None
        assert sin is not None
        fused_latent_norm_rope_write(
            q, latents, kv_cache.blocks, inputs.slot_mapping, cos, sin, self.norm, _EPS, sizes.interleaved,
            kv_cache.scales,
        )  # fmt: skip
        return self._attend(q, kv_cache, inputs).flatten(1)

    def _attend(self, q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs) -> Tensor:
        """Return the attention of all of the step's tokens, [T, Hq, V]."""
        split = inputs.num_decodes
        tables, lens = inputs.block_tables, inputs.seq_lens
        parts: list[Tensor] = []
        if split > 0:
            decodes = kv_cache, tables[:split], lens[:split], inputs.splits
            parts.append(self._attend_absorbed(q[:split], *decodes))
        if split < q.shape[0]:
            chunks = kv_cache, tables[split:], lens[split:], inputs.query_start, inputs.chunks
            parts.append(self._attend_chunks(q[split:], *chunks))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_absorbed(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        block_tables: Tensor,
        seq_lens: Tensor,
        splits: DecodeSplits | None = None,
    ) -> Tensor:
        """Return the attention of one token per sequence, [S, Hq, V]."""
        sizes = self._sizes
        keys, values = self.expansion[:, : sizes.key_dim], self.expansion[:, sizes.key_dim :]
        absorbed = torch.bmm(q[..., : sizes.key_dim].transpose(0, 1), keys).transpose(0, 1)
        sums = latent_decode_attention(
            torch.cat((absorbed, q[..., sizes.key_dim :]), dim=-1),
            kv_cache.blocks, block_tables, seq_lens, self.scale, sizes.rank, splits, kv_cache.scales,
        )  # fmt: skip
        return torch.bmm(sums.transpose(0, 1), values.mT).transpose(0, 1)

    def _attend_chunks(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        bounds: ChunkBounds | None,
    ) -> Tensor:
        """Return the attention of chunks, [T, Hq, V], computed in the cheaper of the two ways."""
        if bounds is not None and self._sizes.expansion_is_cheaper(*bounds):
            return latent_prefill_attention(
                q, kv_cache.blocks, block_tables, query_start, seq_lens, bounds, self.scale, self.expansion,
                kv_cache.scales,
            )  # fmt: skip
        # Each token is a sequence of its own, which ends with it. Padding after the last chunk has no tokens.
        token = torch.arange(len(q), dtype=torch.int32, device=q.device)
        chunk = torch.searchsorted(query_start, token, right=True) - 1
        is_padding = chunk >= len(seq_lens)
        chunk = chunk.clamp(max=len(seq_lens) - 1)
        lens = (seq_lens[chunk] - query_start[chunk + 1] + token + 1).masked_fill_(is_padding, 0)
        return self._attend_absorbed(q, kv_cache, block_tables.index_select(0, chunk), lens)


def _select(x: Tensor | Float8Tokens, tokens: Tensor) -> Tensor | Float8Tokens:
    if isinstance(x, Float8Tokens):
        return Float8Tokens(x.codes.index_select(0, tokens), x.scales.index_select(0, tokens), x.dtype)
    return x.index_select(0, tokens)
