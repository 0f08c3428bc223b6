"""Feed-forward networks of a decoder layer; their inner dimension is sharded over the ranks."""

from __future__ import annotations

from torch import Tensor

from ...kernels.activation import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS, GatedActivation
from ...kernels.quantized_linear import Float8Tokens
from ...proto.model.spec import DecoderSpec, MlpSpec
from .layers import ColumnParallelLinear, PartialSum, Projection, RowParallelLinear
from .load_context import LoadContext


class Mlp:
    """Gated feed-forward network."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: MlpSpec, name: str) -> None:
        inner, shard = own.intermediate_size, load.shard(own.intermediate_size)
        gate, up, down = own.gated_names
        if own.fused_gate_up or load.checkpoint.has_layer(f"{name}.gate_up_proj"):
            fused = f"{name}.gate_up_proj"
            projections = [Projection(fused, shard, start, 2 * inner) for start in (0, inner)]
        else:
            projections = [Projection(f"{name}.{part}", shard) for part in (gate, up)]
        self.gate_up = ColumnParallelLinear(load, projections, spec.hidden_size, bias=own.bias)
        self.down = RowParallelLinear(load, f"{name}.{down}", inner, spec.hidden_size, bias=own.bias)
        self.activation, self._num_gates = spec.activation, len(shard)
        self._gate_factor, self._factor = own.multipliers
        self.limit, self.clamp = own.limit, own.clamp

    def forward(self, x: Tensor | Float8Tokens) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        if self.limit or self.clamp is not None:
            inner = GatedActivation(self.activation, self.clamp, self.limit)(self.gate_up.forward(x))
            return self.down.forward_partial(inner)
        if self._gate_factor != 1.0 or self._factor != 1.0:
            inner = self.gate_up.forward(x)
            inner[:, : self._num_gates] *= self._gate_factor
            return self.down.forward(GATED_ACTIVATIONS[self.activation](inner)).mul_(self._factor)
        return self.down.forward_partial(self.gate_up.forward_gated(x, self.activation))


class UngatedMlp:
    """Feed-forward network of two layers."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: MlpSpec, name: str) -> None:
        assert own.names is not None
        up, down = (f"{name}.{part}" for part in own.names)
        inner = own.intermediate_size
        projections = [Projection(up, load.shard(inner))]
        self.up = ColumnParallelLinear(load, projections, spec.hidden_size, bias=own.bias)
        self.down = RowParallelLinear(load, down, inner, spec.hidden_size, bias=own.bias)
        self.activation = UNGATED_ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        return self.down.forward_partial(self.activation(self.up.forward(x)))
