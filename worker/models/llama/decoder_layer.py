"""DecoderLayer: attention and feed-forward network with their norms, and its form for the decode op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ....kernels.decode_layers import DenseLayer, LayerAdapters
from ....kernels.norm import add_rms_norm, add_rms_norm_float8, rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....proto.model.attention import AttentionSpec
from ....proto.model.compressed import CompressedSpec, SharedKvSpec
from ....proto.model.mla import MlaSpec
from ....proto.model.pooled_mla import PooledMlaSpec
from ....proto.model.spec import DecoderSpec, LayerSpec, Norms, ResidualFactors
from ...attention import AttentionInputs, LayerCache
from ...weights.linear_weight import packed_weight
from ..layers import ColumnParallelLinear, GatedNorm, LayerNorm, PartialSum, Rotations
from ..load_context import LoadContext
from ..mixers.attention import Attention
from ..mixers.block_sparse import BlockSparseAttention
from ..mixers.compressed import CompressedAttention, SharedKvAttention
from ..mixers.mla import MlaAttention
from ..mixers.pooled_mla import PooledMlaAttention
from ..mixers.state_mixers import make_state_mixer
from ..mlp import Mlp, UngatedMlp
from ..moe.moe import MixtureOfExperts
from ..output_tokens import OutputTokens

# The weight of an RMSNorm, or a norm of another kind.
Norm = Tensor | LayerNorm | GatedNorm


class Mixer(Protocol):
    """The part of a layer that reads other tokens: attention of one of the kinds in `mixers`."""

    qkv: ColumnParallelLinear
    rope: str | None

    def forward(
        self, x: Tensor | Float8Tokens, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]; writes the tokens to the cache before it reads them."""
        ...


class FeedForward(Protocol):
    """The part of a layer that computes each token by itself."""

    def forward(self, x: Tensor) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        ...


class DecoderLayer:
    """Attention and feed-forward network, each added to the residual, with norms before, after, or both."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        norms = layer.norms or spec.norms

        def norm(own_name: str | None) -> Norm | None:
            if own_name is not None and own_name in [getattr(norms, field) for field in norms.gated]:
                return GatedNorm.read(
                    load, f"{name}.{own_name}", spec.hidden_size, norms.gate_rank, spec.norm_eps
                )
            return None if own_name is None else read_norm(load, spec, norms, f"{name}.{own_name}")

        self.residual_factors = layer.residual_factors
        is_plain = (
            spec.residual_scale == 1.0
            and layer.residual_factors is None
            and norms.kind == "rms"
            and not spec.parallel_residual
        )
        if not is_plain or norms.after_attention or norms.after_mlp:
            load = replace(load, peers=None)  # another op follows the sum than the addition to the residual
        self.comm, self.peers = load.comm, load.peers
        self.norm_eps = spec.norm_eps
        self.residual_scale = spec.residual_scale
        self.attention: Mixer | None = None
        self.before_attention = self.after_attention = None
        if layer.mixer is not None:
            self.before_attention = norm(norms.before_attention)
            mixer_name = layer.mixer_name or spec.names.attention
            self.attention = self.make_mixer(load, spec, layer, f"{name}.{mixer_name}")
            self.after_attention = norm(norms.after_attention)
        self.is_parallel = spec.parallel_residual
        self.mlp: FeedForward | None = None
        self.before_mlp = self.after_mlp = None
        if layer.mlp is not None or layer.has_experts:
            self.before_mlp = norm(norms.before_mlp)
            self.mlp = self.make_mlp(load, spec, layer, name)
            self.after_mlp = norm(norms.after_mlp)

    def make_mixer(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> Mixer:
        """Return the part of the layer that reads other tokens."""
        if isinstance(layer.mixer, PooledMlaSpec):
            return PooledMlaAttention(load, spec, layer.mixer, name)
        if isinstance(layer.mixer, MlaSpec):
            return MlaAttention(load, spec, layer.mixer, name)
        if isinstance(layer.mixer, AttentionSpec):
            if layer.mixer.indexer is not None:
                return BlockSparseAttention(load, spec, layer.mixer, name)
            return Attention(load, spec, layer.mixer, name)
        if isinstance(layer.mixer, CompressedSpec):
            return CompressedAttention(load, spec, layer.mixer, name)
        if isinstance(layer.mixer, SharedKvSpec):
            return SharedKvAttention(load, spec, layer.mixer, name)
        return make_state_mixer(load, spec, layer.mixer, name)

    def make_mlp(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> FeedForward:
        """Return the feed-forward network of the layer `name`."""
        if layer.has_experts:
            assert spec.experts is not None
            experts = replace(spec.experts, limits=layer.expert_limits)
            return MixtureOfExperts(load, experts, spec.hidden_size, spec.activation, name)
        assert layer.mlp is not None
        kind = Mlp if layer.mlp.names is None else UngatedMlp
        return kind(load.for_dense_networks(), spec, layer.mlp, f"{name}.{spec.names.mlp}")

    def forward(
        self,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor | PartialSum | None:
        """Compute the layer; each residual addition is fused with the norm that follows it.

        Args:
            x: output of the previous layer, still to be added to `residual`; None for the first layer.
            residual: [T, E]; updated in place.

        Returns:
            the layer's output, still to be added to `residual`, [T, E]; None if that has it.
        """
        if self.attention is None:
            return self._feed_forward(x, residual)
        if self.residual_factors is not None:
            return self._forward_normed(self.residual_factors, x, residual, rotations, kv_cache, inputs)
        if self.is_parallel:
            assert self.mlp is not None
            shared = self.add(x, residual, self.before_attention)
            attended = self.attention.forward(shared, rotations, kv_cache, inputs)
            out = self.mlp.forward(shared)
            assert isinstance(attended, Tensor)  # without peers no sum is deferred
            assert isinstance(out, Tensor)
            return out.add_(attended)
        normed = self._add_and_quantize(self.attention.qkv, x, residual, self.before_attention)
        attended = self.attention.forward(normed, rotations, kv_cache, inputs)
        return self._feed_forward(self._finish(attended, self.after_attention), residual)

    def _forward_normed(
        self,
        factors: ResidualFactors,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        """As `forward`, for a layer whose residual is normalized."""
        assert self.attention is not None
        assert self.mlp is not None
        normed = self.add(x, residual, self.before_attention)
        attended = self.attention.forward(normed, rotations, kv_cache, inputs)
        assert isinstance(attended, Tensor)  # without peers no sum is deferred
        hidden = torch.add(normed * factors.input, attended, alpha=factors.mixer)
        normed = self.add(None, hidden, self.before_mlp)
        out = self.mlp.forward(normed)
        assert isinstance(out, Tensor)
        torch.mul(normed, factors.mlp_input, out=residual)
        return out.mul_(factors.mlp)

    @property
    def supports_outputs(self) -> bool:
        """Return whether the layer can compute the output of some tokens only."""
        return (
            isinstance(self.attention, Attention) and not self.is_parallel and self.residual_factors is None
        )

    def forward_outputs(
        self,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        outputs: OutputTokens,
    ) -> tuple[Tensor | PartialSum | None, Tensor]:
        """As `forward`, but only keys and values are computed for all tokens; requires `supports_outputs`.

        Returns:
            the layer's output, None if the residual has it, and the residual of these tokens, each [N, E].
        """
        assert isinstance(self.attention, Attention)
        normed = self._add_and_quantize(self.attention.qkv, x, residual, self.before_attention)
        attended = self.attention.forward(normed, rotations, kv_cache, outputs.inputs, outputs.index)
        residual = residual.index_select(0, outputs.index)
        return self._feed_forward(self._finish(attended, self.after_attention), residual), residual

    def forward_mixture(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the experts' result, [T, E], before the norm and the scale that follow; add to the residual.

        Args:
            attended: result of the attention, all ranks' sum, before the norm and the scale that follow.
        """
        assert self.mlp is not None
        x = self.mlp.forward(
            self.add(self._finish(attended, self.after_attention), residual, self.before_mlp)
        )
        assert isinstance(x, Tensor)  # the sum of experts is not deferred
        return x

    def _feed_forward(self, x: Tensor | PartialSum | None, residual: Tensor) -> Tensor | PartialSum:
        """Return the layer's output; x is what the mixer adds to the residual, or the previous layer's output."""
        if self.mlp is None:
            assert x is not None
            return x
        if isinstance(self.mlp, Mlp):
            out = self.mlp.forward(self._add_and_quantize(self.mlp.gate_up, x, residual, self.before_mlp))
        else:
            out = self.mlp.forward(self.add(x, residual, self.before_mlp))
        return self._finish(out, self.after_mlp)

    def to_dense_layer(self, ropes: Sequence[str]) -> DenseLayer | None:
        """Return the layer for kernels.decode_layers. Returns None if a DenseLayer cannot represent it.

        That of a mixture of experts has no feed-forward network; see `forward_mixture`.

        Args:
            ropes: keys of the model's rotary embeddings; a DenseLayer refers to them by index.
        """
        norms = self.before_attention, self.before_mlp, self.after_attention, self.after_mlp
        if self.peers is not None or not isinstance(self.attention, Attention) or self.residual_factors:
            return None
        adapted = self.attention.qkv.lora.factors or self.attention.output.lora.factors
        is_mixture = isinstance(self.mlp, MixtureOfExperts) and not adapted
        if not isinstance(self.mlp, Mlp) and not is_mixture:
            return None
        mlp = self.mlp if isinstance(self.mlp, Mlp) else None
        return make_dense_layer(self.attention, mlp, norms, self.norm_eps, ropes, self.residual_scale)

    def _add_and_quantize(
        self,
        consumer: ColumnParallelLinear,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        norm: Norm | None,
    ) -> Tensor | Float8Tokens:
        """As `add`, but the norm quantizes its output if `consumer` multiplies in float8; no extra memory pass."""
        if consumer.accepts_float8 and isinstance(x, Tensor) and isinstance(norm, Tensor):
            return Float8Tokens(*add_rms_norm_float8(x, residual, norm, self.norm_eps), x.dtype)
        return self.add(x, residual, norm)

    def add(self, x: Tensor | PartialSum | None, residual: Tensor, norm: Norm | None) -> Tensor:
        """Add x, if any, to the residual; return the residual, normalized if there is a norm."""
        if isinstance(x, PartialSum):
            if isinstance(norm, Tensor) and self.peers is not None:
                return self.peers.add_rms_norm(x.part, residual, norm, self.norm_eps)
            x = self.comm.all_reduce(x.part)
        if norm is None:
            return residual if x is None else residual.add_(x)
        if not isinstance(norm, Tensor):
            return norm.apply(residual if x is None else residual.add_(x))
        if x is None:
            return rms_norm(residual, norm, self.norm_eps)
        return add_rms_norm(x, residual, norm, self.norm_eps)

    def input_of(self, x: Tensor | PartialSum | None, residual: Tensor) -> Tensor:
        """Return the hidden state that `forward` gets in two parts, [T, E], and leave these unchanged."""
        if isinstance(x, PartialSum):
            x = self.comm.all_reduce(x.part.clone())
        return residual.clone() if x is None else residual + x

    def _finish(self, x: Tensor | PartialSum, norm: Norm | None) -> Tensor | PartialSum:
        """Apply the norm and the scale that precede the residual addition, if the layer has them."""
        if isinstance(x, PartialSum):
            return x
        if norm is not None:
            x = rms_norm(x, norm, self.norm_eps) if isinstance(norm, Tensor) else norm.apply(x)
        return x if self.residual_scale == 1.0 else x.mul_(self.residual_scale)


def make_dense_layer(
    attention: Attention,
    mlp: Mlp | None,
    norms: tuple[Norm | None, Norm | None, Norm | None, Norm | None],
    eps: float,
    ropes: Sequence[str],
    residual_scale: float = 1.0,
) -> DenseLayer | None:
    """Return a layer for kernels.decode_layers. Returns None if a DenseLayer cannot represent it.

    Args:
        mlp: None if the caller computes it.
        norms: before attention, before the feed-forward network, and after each.
        ropes: as for DecoderLayer.to_dense_layer.
    """
    before_attention, before_mlp, after_attention, after_mlp = norms
    if not isinstance(before_attention, Tensor) or not isinstance(before_mlp, Tensor):
        return None
    if not isinstance(after_attention, Tensor | None) or not isinstance(after_mlp, Tensor | None):
        return None
    has_more = (
        bool(attention.steps)
        or attention.spec.gate is not None
        or attention.spec.value_dim is not None
        or attention.variant.chunk > 0
        or attention.variant.sinks is not None
        or attention.output.bias is not None
        or (mlp is not None and (mlp.limit > 0 or mlp.clamp is not None))
    )
    qkv, output = packed_weight(attention.qkv.weight), packed_weight(attention.output.weight)
    if has_more or qkv is None or output is None:
        return None
    gate_up = down = None
    if mlp is not None:
        gate_up, down = packed_weight(mlp.gate_up.weight), packed_weight(mlp.down.weight)
        if gate_up is None or down is None or mlp.down.bias is not None:
            return None
    return DenseLayer(
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        qkv_bias=attention.qkv.bias,
        gate_up_bias=None if mlp is None else mlp.gate_up.bias,
        before_attention=before_attention,
        before_mlp=before_mlp,
        after_attention=after_attention,
        after_mlp=after_mlp,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        eps=eps,
        residual_scale=residual_scale,
        rope=None if attention.rope is None else ropes.index(attention.rope),
        gate="silu" if mlp is None else mlp.activation,
        head_dim=attention.spec.head_dim,
        scale=attention.spec.scale,
        variant=attention.variant,
        adapters=None if mlp is None else _layer_adapters(attention, mlp),
    )


def _layer_adapters(attention: Attention, mlp: Mlp) -> LayerAdapters | None:
    layers = attention.qkv, attention.output, mlp.gate_up, mlp.down
    factors = [layer.lora.factors for layer in layers]
    return LayerAdapters(*factors) if any(factors) else None


def read_norm(load: LoadContext, spec: DecoderSpec, norms: Norms, name: str) -> Norm:
    weight = load.norm(name, spec.hidden_size, norms.offset)
    if norms.kind == "rms":
        return weight
    bias = load.replicated(f"{name}.bias", spec.hidden_size) if norms.kind == "layer" else None
    return LayerNorm(weight, bias, spec.norm_eps)
