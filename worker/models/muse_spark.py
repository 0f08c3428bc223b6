"""MuseSparkDecoder: layers whose residual is weighed against what attention and feed-forward network add (2026)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.norm import rms_norm
from ...proto.model.families.muse_spark import MuseSpark
from ...proto.model.spec import DecoderSpec, LayerSpec
from ..attention import AttentionInputs, LayerCache
from .layers import PartialSum, Rotations, ScaledNorm
from .llama.decoder import Decoder
from .llama.decoder_layer import DecoderLayer, FeedForward
from .load_context import LoadContext
from .mixers.attention import Attention
from .moe.moe import MixtureOfExperts
from .output_tokens import OutputTokens

# Least square of the factors of the residual.
_MIN_SQUARE = 1e-3


class ResidualGate:
    """Factors of each number of the residual, and of what is added to it."""

    def __init__(self, load: LoadContext, name: str, size: int, temperature: float) -> None:
        gate = torch.empty(size, dtype=torch.float32, device=load.device)
        load.checkpoint.read_into(gate, f"{name}.gate", (size,))
        gate /= temperature
        self._added = gate.sigmoid()
        self._kept = ((-gate).sigmoid() * (1 + self._added)).clamp(min=_MIN_SQUARE).sqrt()

    def add(self, x: Tensor, residual: Tensor) -> None:
        """Replace the residual [T, E] by the weighted sum, computed in float32."""
        residual.copy_(residual * self._kept + x * self._added)


class NormedMixture(MixtureOfExperts):
    """A mixture of experts that read normalized numbers of a width of their own."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, name: str) -> None:
        assert spec.experts is not None
        super().__init__(load, spec.experts, spec.hidden_size, spec.activation, name)
        self._norm = load.norm(f"{self.block}.pre_expert_norm", spec.experts.latent_size, 1.0)
        self._eps = spec.norm_eps

    def expert_inputs(self, x: Tensor) -> Tensor:
        return rms_norm(super().expert_inputs(x), self._norm, self._eps)


class MuseSparkLayer(DecoderLayer):
    """A layer with a gated residual, which has the layer's output when `forward` returns None."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(replace(load, peers=None), spec, layer, name)  # norms follow the sums
        variant, size = spec.variant, spec.hidden_size
        assert isinstance(variant, MuseSpark)
        self._attention_gate, self._mlp_gate = (
            ResidualGate(load, f"{name}.post_{part}_residual_gate", size, variant.gate_temperature)
            for part in ("attention", "feedforward")
        )
        self._result_eps, self._ones = variant.result_eps, load.empty(size).fill_(1)
        self._mlp_norm = ScaledNorm.read(load, f"{name}.post_feedforward_layernorm", size, variant.result_eps)

    def make_mlp(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> FeedForward:
        if layer.has_experts:
            return NormedMixture(load, spec, name)
        return super().make_mlp(load, spec, layer, name)

    def forward(
        self,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> None:
        """Compute the layer; nothing is left to be added to the residual."""
        assert x is None
        assert self.attention is not None
        normed = self.add(None, residual, self.before_attention)
        self._end(self.attention.forward(normed, rotations, kv_cache, inputs), residual)

    def forward_outputs(
        self,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        outputs: OutputTokens,
    ) -> tuple[None, Tensor]:
        assert x is None
        assert isinstance(self.attention, Attention)
        normed = self.add(None, residual, self.before_attention)
        attended = self.attention.forward(normed, rotations, kv_cache, outputs.inputs, outputs.index)
        residual = residual.index_select(0, outputs.index)
        self._end(attended, residual)
        return None, residual

    def _end(self, attended: Tensor | PartialSum, residual: Tensor) -> None:
        """Add the result of attention and that of the feed-forward network to the residual."""
        assert isinstance(attended, Tensor)  # without peers no sum is deferred
        assert self.mlp is not None
        self._attention_gate.add(rms_norm(attended, self._ones, self._result_eps), residual)
        out = self.mlp.forward(self.add(None, residual, self.before_mlp))
        assert isinstance(out, Tensor)
        self._mlp_gate.add(self._mlp_norm.apply(out), residual)

    def to_dense_layer(self, ropes: Sequence[str]) -> None:
        """Return None: a DenseLayer cannot represent the layer."""


class MuseSparkDecoder(Decoder):
    """A decoder of MuseSparkLayers."""

    layer_class = MuseSparkLayer
