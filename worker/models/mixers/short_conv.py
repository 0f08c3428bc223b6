"""ShortConv: a gated convolution over the last few tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....kernels.quantized_linear import Float8Tokens
from ....kernels.recurrence import causal_conv
from ....kernels.state_runs import StateRuns
from ....proto.model.short_conv import ShortConvSpec
from ....proto.model.spec import DecoderSpec
from ..layers import ColumnParallelLinear, PartialSum, Projection, RowParallelLinear
from ..load_context import LoadContext
from .state_mixer import StateMixer, read_conv


class ShortConv(StateMixer):
    """Gated convolution; each rank computes its part of the channels."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: ShortConvSpec, name: str) -> None:
        channels, shard = own.num_channels, load.shard(own.num_channels)
        projections = [
            Projection(f"{name}.in_proj", shard, start, 3 * channels)
            for start in range(0, 3 * channels, channels)
        ]
        self.qkv = ColumnParallelLinear(load, projections, spec.hidden_size, bias=own.bias)
        self.weight, self.bias = read_conv(
            load,
            f"{name}.conv",
            [(shard.start, len(shard))],
            own.width,
            num_channels=channels,
            bias=own.bias,
        )
        self.output = RowParallelLinear(load, f"{name}.out_proj", channels, spec.hidden_size, own.bias)

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        b, c, inner = self.qkv.forward(x).chunk(3, dim=1)
        mixed = runs.compute(causal_conv, b * inner, self.weight, self.bias, states=states[0], silu=False)
        return self.output.forward_partial(mixed.mul_(c))
