"""Mamba1: a selective state space of a vector per channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.recurrence import causal_conv, selective_scan
from ....kernels.state_runs import StateRuns
from ....proto.model.mamba1 import Mamba1Spec
from ....proto.model.spec import DecoderSpec
from ..layers import ColumnParallelLinear, PartialSum, Projection, RowParallelLinear
from ..load_context import LoadContext
from .state_mixer import StateMixer, read_conv, read_float32


class Mamba1(StateMixer):
    """A mixer of Mamba; each rank computes its part of the channels."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: Mamba1Spec, name: str) -> None:
        self.spec = own
        channels, shard = own.num_channels, load.shard(own.num_channels)
        self.qkv = ColumnParallelLinear(
            load,
            [Projection(f"{name}.in_proj", shard, start, 2 * channels) for start in (0, channels)],
            spec.hidden_size,
            bias=own.bias,
        )
        self.conv, self.conv_bias = read_conv(
            load,
            f"{name}.conv1d",
            [(shard.start, len(shard))],
            own.width,
            num_channels=channels,
            bias=own.conv_bias,
        )
        num_selected = own.step_rank + 2 * own.state_size
        self.selection = RowParallelLinear(load, f"{name}.x_proj", channels, num_selected, bias=False)
        self.steps = ColumnParallelLinear(
            load, [Projection(f"{name}.dt_proj", shard)], own.step_rank, bias=False
        )
        self.step_bias = read_float32(load, f"{name}.dt_proj.bias", shard)
        decay = torch.empty(len(shard), own.state_size, dtype=torch.float32, device=load.device)
        load.checkpoint.read_into(decay, f"{name}.A_log", (channels, own.state_size), 0, shard.start)
        self.decay = -decay.exp().T.contiguous()
        self.skip = read_float32(load, f"{name}.D", shard)
        lens = {"dt": own.step_rank, "b": own.state_size, "c": own.state_size}
        self.norms: list[Tensor] = []
        if own.norms == "weighted":
            self.norms = [load.norm(f"{name}.{part}_layernorm", length) for part, length in lens.items()]
        elif own.norms == "unweighted":
            self.norms = [load.empty(length).fill_(1) for length in lens.values()]
        self._lens = list(lens.values())
        self.output = RowParallelLinear(load, f"{name}.out_proj", channels, spec.hidden_size, own.bias)

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        inner, gate = self.qkv.forward(x).chunk(2, dim=1)
        inner = runs.compute(causal_conv, inner, self.conv, self.conv_bias, states[0], silu=True)
        selected = self.selection.forward(inner).split(self._lens, dim=1)
        if self.norms:
            selected = tuple(
                rms_norm(part, weight, self.spec.norm_eps)
                for part, weight in zip(selected, self.norms, strict=True)
            )
        steps, b, c = selected
        step = F.softplus(self.steps.forward(steps).float() + self.step_bias)
        y = runs.compute(selective_scan, inner, step, self.decay, b, c, states[1])
        y = y.addcmul_(inner.float(), self.skip).mul_(F.silu(gate.float()))
        return self.output.forward_partial(y.to(inner.dtype))
