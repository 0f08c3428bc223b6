"""Attention: self-attention over the paged cache, in the variants that an AttentionSpec names."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.attention_variant import AttentionVariant
from ....kernels.fused_qk_norm_rope_kv_write import fused_qk_norm_rope_kv_write
from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....proto.model.attention import AttentionSpec
from ....proto.model.spec import DecoderSpec
from ...attention import AttentionInputs, LayerCache, paged_attention
from ...weights.weight_slice import Interleaving, Regrouping, RowOrder
from ..layers import ColumnParallelLinear, LayerNorm, PartialSum, Projection, Rotations, RowParallelLinear
from ..load_context import LoadContext
from .head_steps import HeadLayerNorm, HeadStep, QueryFactors, Rotation, WholeProjectionNorm


class Attention:
    """Self-attention over the paged cache; each rank computes its part of the heads.

    Args:
        in_features: of the input; None for the hidden size.
        shares_input: as for ColumnParallelLinear.

    Attributes:
        steps: change queries, keys and values before the fused op that writes these; most models have none.
    """

    def __init__(
        self,
        load: LoadContext,
        spec: DecoderSpec,
        own: AttentionSpec,
        name: str,
        in_features: int | None = None,
        *,
        shares_input: bool = False,
    ) -> None:
        self.spec, self.rope = own, own.rope
        self.norm_eps = spec.norm_eps
        sinks = (
            load.part(f"{name}.sinks", load.head_shard(own.num_heads, 1)).float() if own.has_sinks else None
        )
        self.variant = AttentionVariant(
            window=own.window, chunk=own.chunk, soft_cap=own.soft_cap, sinks=sinks
        )
        self.qkv = ColumnParallelLinear(
            load,
            _qkv_projections(load, spec, own, name),
            in_features or spec.hidden_size,
            bias=own.qkv_bias,
            shares_input=shares_input,
        )
        # Of keys and values in the cache, on the device and for libraries.
        self._kv_scales = load.kv_scales(name)
        self._fixed_scales: Tensor | None = None
        if self._kv_scales is not None:
            self._fixed_scales = torch.tensor(self._kv_scales, dtype=torch.float32, device=load.device)
        num_heads = len(load.head_shard(own.num_heads, 1))
        # Numbers of the projection before the queries.
        query_len = num_heads * own.head_dim
        self._gate_len = {None: 0, "head": num_heads, "query": query_len, "projection": query_len}[own.gate]
        self._num_kv_heads = len(load.head_shard(own.num_kv_heads, 1))
        output, value_dim = f"{name}.{own.output_name or spec.names.attention_output}", _value_dim(own)
        self.output = RowParallelLinear(
            load, output, own.num_heads * value_dim, spec.hidden_size, own.output_bias
        )
        kind = None if own.qk_norm is None else own.qk_norm.kind
        self.q_norm = self.k_norm = None
        if own.qk_norm is not None and kind in ("head", "rotated_head"):
            self.q_norm, self.k_norm = (
                load.norm(f"{name}.{norm}", own.head_dim, spec.norms.offset) for norm in own.qk_norm.names
            )
        if kind == "rotated_unweighted" and own.rope is not None:
            self.q_norm = self.k_norm = load.empty(own.head_dim).fill_(1)
        if kind == "unweighted":
            self.q_norm = self.k_norm = load.empty(own.head_dim).fill_(1)
        self._result_norm: Tensor | None = None
        if own.normalizes_results:
            self._result_norm = load.empty(_value_dim(own)).fill_(1)
        self._rotates_first = kind in ("rotated_head", "rotated_unweighted")
        self.steps = _head_steps(load, spec, own, name, kind)

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
        return self.forward_projected(self.qkv.forward(x), rotations, kv_cache, inputs, queries)

    def forward_projected(
        self,
        projected: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        queries: Tensor | None = None,
    ) -> Tensor | PartialSum:
        """As `forward`, of what `qkv` returns."""
        inputs = inputs.of_group(kv_cache.group)
        q, gate = self.write(projected, rotations, kv_cache, inputs)
        if self._kv_scales is not None:
            kv_cache = replace(kv_cache, fixed_scales=self._kv_scales)
        if queries is not None:
            q = q.index_select(0, queries)
            gate = None if gate is None else gate.index_select(0, queries)
        attended = paged_attention(q, kv_cache, inputs, self.spec.scale, self.variant)
        if self.spec.value_dim is not None:
            attended = attended[..., : self.spec.value_dim]
        if self._result_norm is not None:
            attended = rms_norm(attended, self._result_norm, self.norm_eps)
        if gate is not None:
            attended = attended * gate.sigmoid().view(*q.shape[:2], -1)
        return self.output.forward_partial(attended.flatten(1))

    def write(
        self, projected: Tensor, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Write the keys and values of tokens to the cache; return the queries, [T, Hq, D], and the gates.

        Args:
            projected: what `qkv` returns.
            inputs: of the cache's group.
        """
        gate = None
        if self._gate_len:
            gate, projected = projected[:, : self._gate_len], projected[:, self._gate_len :].contiguous()
        if self.spec.value_dim is not None:
            projected = self._widen_values(projected, self.spec.value_dim)
        heads = projected.view(projected.shape[0], -1, self.spec.head_dim)
        for step in self.steps:
            step.apply(heads, rotations)
        cos, sin = (None, None) if self._rotates_first else rotations[self.rope]
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
            self._fixed_scales,
        )
        return q, gate

    def _widen_values(self, projected: Tensor, value_dim: int) -> Tensor:
        """Return the projection with scaled values, which zeros make as long as keys."""
        keys_end = projected.shape[1] - self._num_kv_heads * value_dim
        values = projected[:, keys_end:].unflatten(1, (-1, value_dim)) * self.spec.value_scale
        values = F.pad(values, (0, self.spec.head_dim - value_dim))
        return torch.cat((projected[:, :keys_end], values.flatten(1)), dim=1)


def _value_dim(own: AttentionSpec) -> int:
    return own.head_dim if own.value_dim is None else own.value_dim


def _interleaving(spec: DecoderSpec, own: AttentionSpec) -> Interleaving | None:
    """Return the order of the rows of a head's queries and keys in the checkpoint."""
    if not own.interleaved or own.rope is None:
        return None
    return Interleaving(own.head_dim, 2 * len(spec.ropes[own.rope].frequencies))


def _qkv_projections(load: LoadContext, spec: DecoderSpec, own: AttentionSpec, name: str) -> list[Projection]:
    counts = own.num_heads, own.num_kv_heads, own.num_kv_heads
    dims = own.head_dim, own.head_dim, _value_dim(own)
    shards = [load.head_shard(count, dim) for count, dim in zip(counts, dims, strict=True)]
    if not own.fused_qkv:
        interleaving = _interleaving(spec, own)
        parts = "qkk" if own.values_are_keys else "qkv"
        orders: list[RowOrder | None] = [interleaving, interleaving, None]
        gates = []
        if own.gate == "query":
            shards[0] = load.head_shard(own.num_heads, 2 * own.head_dim)
            orders[0] = Regrouping((own.head_dim, own.head_dim), (1, 0))
        elif own.gate == "head":
            gates = [Projection(f"{name}.g_proj", load.head_shard(own.num_heads, 1))]
        elif own.gate == "projection":
            gates = [Projection(f"{name}.gate_proj", shards[0])]
        return gates + [
            Projection(f"{name}.{part}_proj", shard, interleaving=order)
            for part, shard, order in zip(parts, shards, orders, strict=True)
        ]
    stored_len = sum(counts) * own.head_dim
    starts = [sum(counts[:index]) * own.head_dim for index in range(3)]
    return [
        Projection(f"{name}.qkv_proj", shard, start, stored_len)
        for shard, start in zip(shards, starts, strict=True)
    ]


def _head_steps(
    load: LoadContext, spec: DecoderSpec, own: AttentionSpec, name: str, norm_kind: str | None
) -> list[HeadStep]:
    num_q, num_kv = (len(load.head_shard(count, 1)) for count in (own.num_heads, own.num_kv_heads))
    steps: list[HeadStep] = []
    if norm_kind == "projection":
        for part, count, start in (("q", own.num_heads, 0), ("k", own.num_kv_heads, num_q)):
            shard = load.head_shard(count, own.head_dim)
            steps.append(
                WholeProjectionNorm(load, f"{name}.{part}_norm", shard, start * own.head_dim, spec.norm_eps)
            )
    if norm_kind == "layer":
        steps += _head_layer_norms(load, spec, own, name)
    if own.temperature is not None:
        steps.append(QueryFactors(num_q))
    if norm_kind in ("rotated_head", "rotated_unweighted"):
        steps.append(Rotation(own.rope, num_q + num_kv))
    return steps


def _head_layer_norms(
    load: LoadContext, spec: DecoderSpec, own: AttentionSpec, name: str
) -> list[HeadLayerNorm]:
    """Return the norms of queries and of keys, with weights for each of this rank's heads."""
    assert own.qk_norm is not None
    interleaving, head_dim, start = _interleaving(spec, own), own.head_dim, 0
    norms = []
    for norm, count in zip(own.qk_norm.names, (own.num_heads, own.num_kv_heads), strict=True):
        heads = load.head_shard(count, 1)
        weight = load.empty(len(heads), head_dim)
        if "{}" in norm:
            for row, head in zip(weight, range(heads.start, heads.end), strict=True):
                load.checkpoint.read_into(row, f"{name}.{norm.format(head)}.weight", (head_dim,))
            for head in range(count):
                load.checkpoint.ignore(f"{name}.{norm.format(head)}.weight")
        else:
            load.checkpoint.read_into(weight, f"{name}.{norm}.weight", (count, head_dim), 0, heads.start)
        if interleaving is not None:
            weight = interleaving.reorder(weight, dim=1)
        norms.append(HeadLayerNorm(LayerNorm(weight, None, spec.norm_eps), start))
        start += len(heads)
    return norms
