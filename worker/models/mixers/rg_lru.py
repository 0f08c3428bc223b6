"""RgLru: a gated linear recurrent unit behind a short convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.activation import UNGATED_ACTIVATIONS
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.recurrence import causal_conv, rg_lru
from ....kernels.state_runs import StateRuns
from ....proto.model.rg_lru import RgLruSpec
from ....proto.model.spec import DecoderSpec
from ..layers import ColumnParallelLinear, PartialSum, Projection, RowParallelLinear
from ..load_context import LoadContext
from .state_mixer import StateMixer, read_conv, read_float32

# Exponent of the decays, a constant of the architecture.
_EXPONENT = 8.0


class RgLru(StateMixer):
    """A recurrent block of Griffin; each rank computes its part of the heads."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: RgLruSpec, name: str) -> None:
        channels, shard, heads = own.num_channels, load.shard(own.num_channels), load.shard(own.num_heads)
        self._activation = UNGATED_ACTIVATIONS[spec.activation]
        projections = [Projection(f"{name}.linear_{part}", shard) for part in "xy"]
        self.qkv = ColumnParallelLinear(load, projections, spec.hidden_size, bias=True)
        self.conv, self.conv_bias = read_conv(
            load,
            f"{name}.conv_1d",
            [(shard.start, len(shard))],
            own.width,
            num_channels=channels,
            bias=True,
        )
        # Of the input's and the recurrence's gates: [H, W, 2 W] and [H, 1, 2 W].
        width, gates = channels // own.num_heads, ("input", "recurrent")
        weights = [load.empty(len(heads), width, width) for _ in gates]
        biases = [load.empty(len(heads), width) for _ in gates]
        for gate, weight, bias in zip(gates, weights, biases, strict=True):
            stored = f"{name}.rg_lru.{gate}_gate"
            load.checkpoint.read_into(
                weight, f"{stored}_weight", (own.num_heads, width, width), 0, heads.start
            )
            load.checkpoint.read_into(bias, f"{stored}_bias", (own.num_heads, width), 0, heads.start)
        self.gate_weight, self.gate_bias = torch.cat(weights, dim=2), torch.cat(biases, dim=1)[:, None]
        parameter = read_float32(load, f"{name}.rg_lru.recurrent_param", shard)
        self.decay = -_EXPONENT * F.softplus(parameter)
        self.output = RowParallelLinear(load, f"{name}.linear_out", channels, spec.hidden_size, bias=True)

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        inner, gate = self.qkv.forward(x).chunk(2, dim=1)
        inner = runs.compute(causal_conv, inner, self.conv, self.conv_bias, states=states[0], silu=False)
        heads = inner.view(len(inner), len(self.gate_weight), -1).transpose(0, 1)
        gates = torch.baddbmm(self.gate_bias, heads, self.gate_weight)
        mixed = runs.compute(rg_lru, inner, gates, self.decay, states=states[1])
        return self.output.forward_partial(mixed.mul_(self._activation(gate.contiguous())))
