"""Attention: self-attention over the paged cache, in the variants that a DecoderSpec names."""

from __future__ import annotations

from torch import Tensor

from ....kernels.all_reduce_norm import Peers
from ....kernels.attention_variant import AttentionVariant
from ....kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.rope import apply_rope
from ....proto.model.spec import DecoderSpec, LayerSpec
from ...attention import AttentionInputs, LayerCache, paged_attention
from ...weights.weight_slice import Interleaving
from ..layers import (
    TEMPERATURE,
    ColumnParallelLinear,
    LayerNorm,
    PartialSum,
    Projection,
    Rotations,
    RowParallelLinear,
    WholeProjectionNorm,
)
from ..load_context import LoadContext


class Attention:
    """Self-attention over the paged cache; each rank computes its part of the heads.

    Args:
        in_features: of the input; None for the hidden size.
    """

    def __init__(
        self,
        load: LoadContext,
        spec: DecoderSpec,
        layer: LayerSpec,
        name: str,
        peers: Peers | None,
        in_features: int | None = None,
    ) -> None:
        self.head_dim = spec.head_dim
        self.scale = spec.attention_scale
        self.norm_eps = spec.norm_eps
        self.rope = layer.rope
        sinks = None
        if spec.attention_sinks:
            sinks = load.part(f"{name}.sinks", load.head_shard(spec.num_heads, 1)).float()
        temperature = spec.query_temperature
        self.has_temperature = temperature is not None and temperature.of_rotated == (layer.rope is not None)
        self.variant = AttentionVariant(
            window=layer.window, chunk=layer.chunk, soft_cap=spec.attention_soft_cap, sinks=sinks
        )
        self.qkv = ColumnParallelLinear(
            load,
            _qkv_projections(load, spec, layer, name),
            in_features or spec.hidden_size,
            bias=spec.qkv_bias,
        )
        q_size = spec.num_heads * spec.head_dim
        output = f"{name}.{spec.names.attention_output}"
        self.output = RowParallelLinear(load, output, q_size, spec.hidden_size, spec.output_bias, peers)
        self.rotates_first = spec.qk_norm in ("rotated_head", "rotated_unweighted")
        self.q_norm = self.k_norm = None
        if spec.qk_norm in ("head", "rotated_head"):
            self.q_norm, self.k_norm = (
                load.norm(f"{name}.{own}", spec.head_dim, spec.norm_offset) for own in spec.qk_norm_names
            )
        if spec.qk_norm == "rotated_unweighted" and layer.rope is not None:
            self.q_norm = self.k_norm = load.empty(spec.head_dim).fill_(1)
        self.value_norm: Tensor | None = load.empty(spec.head_dim).fill_(1) if spec.value_norm else None
        self.layer_norms = _head_layer_norms(load, spec, layer, name) if spec.qk_norm == "layer_norm" else []
        self.projection_norms = _projection_norms(load, spec, name) if spec.qk_norm == "projection" else []

    def forward(
        self,
        x: Tensor | Float8Tokens,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        queries: Tensor | None = None,
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]; writes the tokens' keys and values to the cache before attention reads them.

        Args:
            queries: [N] int64, the tokens that `inputs` has as queries; the result is [N, E]. None for all.
        """
        inputs = inputs.of_group(kv_cache.group)
        projected = self.qkv.forward(x)
        num_tokens = projected.shape[0]
        start = 0
        for norm in self.projection_norms:
            norm.apply(projected[:, start : start + norm.length])
            start += norm.length
        heads = projected.view(num_tokens, -1, self.head_dim)
        start = 0
        for layer_norm in self.layer_norms:
            own = heads[:, start : start + len(layer_norm.weight)]
            own.copy_(layer_norm.apply(own))
            start += len(layer_norm.weight)
        if self.has_temperature:
            factors, _ = rotations[TEMPERATURE]
            assert factors is not None
            heads[:, : -2 * kv_cache.blocks.shape[2]] *= factors
        if self.value_norm is not None:
            values = heads[:, -kv_cache.blocks.shape[2] :]
            values.copy_(rms_norm(values, self.value_norm, self.norm_eps))
        cos, sin = rotations[self.rope]
        if self.rotates_first and cos is not None and sin is not None:
            apply_rope(heads[:, : -kv_cache.blocks.shape[2]], cos, sin)
            cos = sin = None
        q = fused_qk_norm_rope_kv_write(
            heads,
            kv_cache.blocks,
            inputs.slot_mapping,
            cos,
            sin,
            self.q_norm,
            self.k_norm,
            self.norm_eps,
            kv_cache.scales,
        )
        if queries is not None:
            q = q.index_select(0, queries)
        attended = paged_attention(q, kv_cache, inputs, self.scale, self.variant)
        return self.output.forward_partial(attended.view(len(q), -1))


def _interleaving(spec: DecoderSpec, layer: LayerSpec) -> Interleaving | None:
    """Return the order of the rows of a head's queries and keys in the checkpoint."""
    if not spec.interleaved_rope or layer.rope is None:
        return None
    return Interleaving(spec.head_dim, 2 * len(spec.ropes[layer.rope].frequencies))


def _qkv_projections(load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> list[Projection]:
    counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    shards = [load.head_shard(count, spec.head_dim) for count in counts]
    if not spec.fused_qkv:
        interleaving = _interleaving(spec, layer)
        parts = "qkk" if layer.values_are_keys else "qkv"
        return [
            Projection(f"{name}.{part}_proj", shard, interleaving=None if place == 2 else interleaving)
            for place, (part, shard) in enumerate(zip(parts, shards, strict=True))
        ]
    stored_len = sum(counts) * spec.head_dim
    starts = [sum(counts[:index]) * spec.head_dim for index in range(3)]
    return [
        Projection(f"{name}.qkv_proj", shard, start, stored_len)
        for shard, start in zip(shards, starts, strict=True)
    ]


def _head_layer_norms(load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> list[LayerNorm]:
    """Return the norms of queries and of keys, with weights for each of this rank's heads."""
    interleaving, head_dim = _interleaving(spec, layer), spec.head_dim
    norms = []
    for own, count in zip(spec.qk_norm_names, (spec.num_heads, spec.num_kv_heads), strict=True):
        heads = load.head_shard(count, 1)
        weight = load.empty(len(heads), head_dim)
        if "{}" in own:
            for row, head in zip(weight, range(heads.start, heads.end), strict=True):
                load.checkpoint.read_into(row, f"{name}.{own.format(head)}.weight", (head_dim,))
            for head in range(count):
                load.checkpoint.ignore(f"{name}.{own.format(head)}.weight")
        else:
            load.checkpoint.read_into(weight, f"{name}.{own}.weight", (count, head_dim), 0, heads.start)
        if interleaving is not None:
            weight = interleaving.reorder(weight, dim=1)
        norms.append(LayerNorm(weight, None, spec.norm_eps))
    return norms


def _projection_norms(load: LoadContext, spec: DecoderSpec, name: str) -> list[WholeProjectionNorm]:
    """Return the norms over all queries and over all keys."""
    return [
        WholeProjectionNorm(load, f"{name}.{own}_norm", load.head_shard(count, spec.head_dim), spec.norm_eps)
        for own, count in (("q", spec.num_heads), ("k", spec.num_kv_heads))
    ]
