"""Gemma 4 (2026): inputs and a factor of each layer, and experts beside a dense network."""

from __future__ import annotations

from torch import Tensor

from ....kernels.linear import linear, pack
from ....kernels.norm import rms_norm
from ....proto.model.experts import Experts
from ....proto.model.families.gemma import Gemma4
from ....proto.model.spec import DecoderSpec, LayerSpec
from ...attention import AttentionInputs, LayerCache
from ...comm.expert_exchange import Dispatched
from ..layers import PartialSum, Rotations
from ..llama.decoder import Decoder
from ..llama.decoder_layer import FeedForward
from ..load_context import LoadContext
from ..media_embeddings import MediaEmbeddings
from ..mlp import Mlp
from ..moe.expert_routing import ExpertChoice
from ..moe.moe import WithExperts, read_experts
from ..output_tokens import OutputTokens
from .shared import GemmaLayer, InputGate, PerLayerEmbedding

# Key of Rotations |-> inputs of all layers, [T, L, P].
_LAYER_INPUTS = "layer inputs"


class ScaledRouter:
    """Router with a norm of its own, and a factor per expert; every rank holds it in full."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, experts: Experts, name: str) -> None:
        self._choice, self._eps = ExpertChoice(experts), spec.norm_eps
        self.weight = pack(load.replicated(f"{name}.proj.weight", experts.count, spec.hidden_size))
        self._norm = load.replicated(f"{name}.scale", spec.hidden_size).mul_(spec.hidden_size**-0.5)
        self._factors = load.replicated(f"{name}.per_expert_scale", experts.count).float()

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> weights, float32, and expert ids, int64, both [T, top_k]."""
        logits = linear(rms_norm(x, self._norm, self._eps), self.weight)
        weights, expert_ids = self._choice.choose(logits)
        return weights * self._factors[expert_ids], expert_ids


class ExpertsBesideDense(WithExperts):
    """The sum of a dense network's and a mixture's results, each normalized before and after.

    Args:
        before_dense: weight of the norm before the dense network.
        name: of the decoder layer.
    """

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, dense: Mlp, before_dense: Tensor, name: str
    ) -> None:
        assert spec.experts is not None
        self.comm, self._lora, self._eps = load.comm, load.lora, spec.norm_eps
        self._dense, self._before_dense = dense, before_dense
        self._after_dense, self._before_experts, self._after_experts = (
            load.norm(f"{name}.{own}", spec.hidden_size, spec.norms.offset)
            for own in (
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            )
        )
        self._router = ScaledRouter(load, spec, spec.experts, f"{name}.router")
        self.experts = read_experts(load, spec.experts, spec.hidden_size, spec.activation, name)

    def forward(self, x: Tensor) -> Tensor:
        """[T, E], before any norm -> [T, E]."""
        dense = self._dense.forward(rms_norm(x, self._before_dense, self._eps))
        assert isinstance(dense, Tensor)  # without peers no sum is deferred
        normed = rms_norm(x, self._before_experts, self._eps)
        part = self.compute(Dispatched(normed, *self._router.choose(x), self._lora.step.token_slots))
        mixed = rms_norm(self.comm.all_reduce(part), self._after_experts, self._eps)
        return rms_norm(dense, self._after_dense, self._eps).add_(mixed)


class Gemma4Layer(GemmaLayer):
    """A layer that ends with its part of the per-layer inputs, and a factor of the sum."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(load, spec, layer, name)
        variant = spec.variant
        assert isinstance(variant, Gemma4)
        self._gate = None if variant.inputs is None else InputGate(load, spec, variant.inputs, name)
        self._factor = load.replicated(f"{name}.layer_scalar", 1)

    def make_mlp(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> FeedForward:
        assert layer.mlp is not None
        dense = Mlp(load, spec, layer.mlp, f"{name}.{spec.names.mlp}")
        if not layer.has_experts:
            return dense
        before_dense, self.before_mlp = self.before_mlp, None
        assert isinstance(before_dense, Tensor)
        return ExpertsBesideDense(load, spec, dense, before_dense, name)

    def forward(
        self,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        x = super().forward(x, residual, rotations, kv_cache, inputs)
        return self._end(x, residual, self._own_inputs(rotations))

    def forward_outputs(
        self,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        outputs: OutputTokens,
    ) -> tuple[Tensor, Tensor]:
        x, residual = super().forward_outputs(x, residual, rotations, kv_cache, outputs)
        own = self._own_inputs(rotations)
        return self._end(x, residual, None if own is None else own.index_select(0, outputs.index)), residual

    def _own_inputs(self, rotations: Rotations) -> Tensor | None:
        """Return the layer's inputs, [T, P]."""
        inputs, _ = rotations.get(_LAYER_INPUTS, (None, None))
        return None if inputs is None else inputs[:, self.index]

    def _end(self, x: Tensor | PartialSum | None, residual: Tensor, inputs: Tensor | None) -> Tensor:
        """Return the layer's output, still to be added to `residual`, which is updated in place."""
        assert isinstance(x, Tensor)  # a norm follows the feed-forward network
        if self._gate is not None and inputs is not None:
            x = self._gate.forward(residual.add_(x), inputs)
        residual.mul_(self._factor)
        return x * self._factor


class Gemma4Decoder(Decoder):
    """A decoder of Gemma4Layers."""

    layer_class = Gemma4Layer

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, num_positions: int, *, has_head: bool = True
    ) -> None:
        assert isinstance(spec.variant, Gemma4)
        self._layer_inputs: PerLayerEmbedding | None = None
        self._pad_token_id = spec.variant.pad_token_id
        if spec.variant.inputs is not None:
            self._layer_inputs = PerLayerEmbedding(load, spec, spec.variant.inputs)
        super().__init__(load, spec, num_positions, has_head=has_head)

    def other_inputs(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor, media: MediaEmbeddings | None
    ) -> Rotations:
        if self._layer_inputs is None:
            return {}
        if media is not None:  # the part of the token is that of padding
            token_ids = token_ids.index_fill(0, media.index, self._pad_token_id)
        return {_LAYER_INPUTS: (self._layer_inputs.forward(token_ids, hidden), None)}
