"""Embeddings of their own that each layer adds its part of (Gemma 3n, 2025), and the end of such layers."""

from __future__ import annotations

from torch import Tensor

from ....kernels.norm import rms_norm
from ....proto.model.spec import DecoderSpec, PerLayerInputs
from ...weights.linear_weight import LinearWeight
from ...weights.weight_slice import WeightSlice
from ..load_context import LoadContext
from ..mlp import UNGATED_ACTIVATIONS
from ..vocab_parallel import VocabParallelEmbedding


class PerLayerEmbedding:
    """The inputs of all layers, from the tokens and from their embeddings.

    The embeddings of tokens, most of the model's weights, are sharded over the ranks.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, inputs: PerLayerInputs) -> None:
        self._vocab_size, self._eps = inputs.vocab_size, spec.norm_eps
        self._shape = len(spec.layers), inputs.size
        width = len(spec.layers) * inputs.size
        self._tokens = VocabParallelEmbedding(
            load, "model.embed_tokens_per_layer", inputs.vocab_size, width, inputs.size**0.5
        )
        self._projection = whole_linear(load, "model.per_layer_model_projection", width, spec.hidden_size)
        self._scale = spec.hidden_size**-0.5
        self._norm = load.norm("model.per_layer_projection_norm", inputs.size, spec.norm_offset)

    def forward(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """[T] and [T, E] -> [T, L, P]."""
        known = token_ids.where(token_ids < self._vocab_size, 0)
        of_tokens = self._tokens.forward(known).unflatten(1, self._shape)
        projected = self._projection.multiply(embedded).mul_(self._scale).unflatten(1, self._shape)
        return rms_norm(projected, self._norm, self._eps).add_(of_tokens).mul_(2**-0.5)


class InputGate:
    """Addend of a layer's output: its part of the inputs, gated by the output."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, inputs: PerLayerInputs, name: str) -> None:
        self._gate = whole_linear(load, f"{name}.per_layer_input_gate", inputs.size, spec.hidden_size)
        self._projection = whole_linear(load, f"{name}.per_layer_projection", spec.hidden_size, inputs.size)
        self._norm = load.norm(f"{name}.post_per_layer_input_norm", spec.hidden_size, spec.norm_offset)
        self._activation = UNGATED_ACTIVATIONS[spec.activation]
        self._eps = spec.norm_eps

    def forward(self, hidden: Tensor, layer_inputs: Tensor) -> Tensor:
        """[T, E] and [T, P] -> [T, E]."""
        gated = self._activation(self._gate.multiply(hidden)) * layer_inputs
        return rms_norm(self._projection.multiply(gated), self._norm, self._eps)


class LayerEnd:
    """The end of a layer of Gemma 4: its part of the per-layer inputs, and a factor of the sum."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, name: str) -> None:
        inputs = spec.per_layer_inputs
        self._gate = None if inputs is None else InputGate(load, spec, inputs, name)
        self._factor: Tensor | None = None
        if spec.layer_scalars:
            self._factor = load.replicated(f"{name}.layer_scalar", 1)

    def forward(self, x: Tensor, residual: Tensor, layer_inputs: Tensor | None) -> Tensor:
        """Return the layer's output, still to be added to `residual`, which is updated in place.

        Args:
            x, residual: [T, E].
            layer_inputs: [T, P], or None without such inputs.
        """
        if self._gate is not None and layer_inputs is not None:
            x = self._gate.forward(residual.add_(x), layer_inputs)
        if self._factor is not None:
            residual.mul_(self._factor)
            x = x * self._factor
        return x


def whole_linear(load: LoadContext, name: str, out_features: int, in_features: int) -> LinearWeight:
    """Read the matrix of a small layer that every rank computes in full."""
    return load.linear([WeightSlice(name, (out_features, in_features), 0, 0, out_features)])
