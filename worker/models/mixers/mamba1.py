"""Mamba1: a selective state space of a vector per channel; its channels may belong to heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.linear import linear, pack
from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.recurrence import causal_conv, selective_scan
from ....kernels.state_runs import StateRuns
from ....proto.model.mamba1 import Mamba1Spec
from ....proto.model.spec import DecoderSpec
from ....proto.model.state import groups_per_rank
from ...weights.weight_slice import Regrouping
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
        inner = runs.compute(causal_conv, inner, self.conv, self.conv_bias, states=states[0], silu=True)
        selected = self.selection.forward(inner).split(self._lens, dim=1)
        if self.norms:
            selected = tuple(
                rms_norm(part, weight, self.spec.norm_eps)
                for part, weight in zip(selected, self.norms, strict=True)
            )
        steps, b, c = selected
        step = F.softplus(self.steps.forward(steps).float() + self.step_bias)
        y = runs.compute(selective_scan, inner, step, self.decay, b, c, states=states[1])
        y = y.addcmul_(inner.float(), self.skip).mul_(F.silu(gate.float()))
        return self.output.forward_partial(y.to(inner.dtype))


class Mamba1Heads(StateMixer):
    """A mixer of Mamba whose heads have step sizes, B and C of their own (Zamba, 2024).

    Each rank computes its part of the channels: some heads, or a part of one.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: Mamba1Spec, name: str) -> None:
        self.spec, self._comm = own, load.comm
        channels, shard = own.num_channels, load.shard(own.num_channels)
        # Of adjacent rows one is an input and one a gate.
        rows = load.shard(2 * channels)
        alternating = Projection(f"{name}.in_proj", rows, interleaving=Regrouping((1, 1), (0, 1)))
        self.qkv = ColumnParallelLinear(load, [alternating], spec.hidden_size, bias=own.bias)
        self.conv, self.conv_bias = read_conv(
            load,
            f"{name}.conv1d",
            [(shard.start, len(shard))],
            own.width,
            num_channels=channels,
            bias=own.conv_bias,
        )
        head_len, num_heads = channels // own.num_heads, groups_per_rank(own.num_heads, load.comm.size)
        self._heads = range(shard.start // head_len, shard.start // head_len + num_heads)
        self._is_whole = len(shard) == num_heads * head_len
        within = slice(shard.start % head_len, shard.start % head_len + len(shard) // num_heads)
        self._head_len = within.stop - within.start
        self._lens = [own.step_rank, own.state_size, own.state_size]

        def read(part: str, *shape: int, dtype: torch.dtype) -> Tensor:
            """Return this rank's heads of a tensor."""
            out = torch.empty(num_heads, *shape, dtype=dtype, device=load.device)
            load.checkpoint.read_into(out, f"{name}.{part}", (own.num_heads, *shape), 0, self._heads.start)
            return out

        selection = read("x_proj_weight", sum(self._lens), head_len, dtype=load.dtype)
        self.selection = [pack(weight[:, within].contiguous()) for weight in selection]
        steps = read("dt_proj_weight", head_len, own.step_rank, dtype=load.dtype)
        self.steps = [pack(weight[within].contiguous()) for weight in steps]
        self.step_bias = read("dt_proj_bias", head_len, dtype=torch.float32)[:, within]
        decay = read("A_log", head_len, own.state_size, dtype=torch.float32)[:, within]
        self.decay = -decay.exp().transpose(1, 2).contiguous()
        self.skip = read("D", head_len, dtype=torch.float32)[:, within].flatten()
        self.output = RowParallelLinear(load, f"{name}.out_proj", channels, spec.hidden_size, own.bias)

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        inner, gate = self.qkv.forward(x).chunk(2, dim=1)
        inner = runs.compute(causal_conv, inner, self.conv, self.conv_bias, states=states[0], silu=True)
        heads = [part.contiguous() for part in inner.split(self._head_len, dim=1)]
        parts = []
        for index, (own, selected) in enumerate(zip(heads, self._select(heads), strict=True)):
            steps, b, c = selected.split(self._lens, dim=1)
            step = F.softplus(linear(steps.contiguous(), self.steps[index]).float() + self.step_bias[index])
            scan = own, step, self.decay[index], b, c
            parts.append(runs.compute(selective_scan, *scan, states=states[1 + index]))
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        y = y.addcmul_(inner.float(), self.skip).mul_(F.silu(gate.float()))
        return self.output.forward_partial(y.to(inner.dtype))

    def _select(self, heads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the inputs of step sizes, B and C of each head, [T, R + 2 N]."""
        selected = [linear(own, weight) for own, weight in zip(heads, self.selection, strict=True)]
        if self._is_whole:
            return selected
        # Ranks that share a head add their parts of its sums.
        (part,) = selected
        every = part.new_zeros(len(part), self.spec.num_heads, part.shape[1])
        every[:, self._heads.start] = part
        return [self._comm.all_reduce(every)[:, self._heads.start]]
