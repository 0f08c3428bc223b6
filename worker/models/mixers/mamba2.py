"""Mamba2: a state space of matrices per head, alone or beside attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from ....kernels.quantized_linear import Float8Tokens
from ....kernels.recurrence import causal_conv, linear_attention
from ....kernels.state_runs import StateRuns
from ....proto.model.mamba2 import Mamba2Spec, Multipliers
from ....proto.model.spec import DecoderSpec
from ...attention import AttentionInputs, LayerCache
from ..layers import ColumnParallelLinear, PartialSum, Projection, Rotations, RowParallelLinear
from ..load_context import LoadContext
from .attention import Attention
from .head_steps import ConstantFactor
from .state_mixer import ShardedGroupNorm, StateMixer, read_conv, read_float32


class Mamba2(StateMixer):
    """A mixer of Mamba 2; each rank computes its part of the heads."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: Mamba2Spec, name: str) -> None:
        self.spec = own
        size, grouped = own.num_heads * own.head_dim, own.num_groups * own.state_size
        inner, heads = load.shard(size), load.shard(own.num_heads)
        groups = load.head_shard(own.num_groups, own.state_size)
        self._inner_len, self._heads, self._group_len = len(inner), len(heads), len(groups)
        # Gates, inputs, B, C and step sizes.
        starts = [0, size, 2 * size, 2 * size + grouped, 2 * (size + grouped)]
        shards = [inner, inner, groups, groups, heads]
        stored_len = 2 * (size + grouped) + own.num_heads
        self.qkv = ColumnParallelLinear(
            load,
            [
                Projection(f"{name}.in_proj", shard, start, stored_len)
                for shard, start in zip(shards, starts, strict=True)
            ],
            spec.hidden_size,
            bias=own.bias,
            shares_input=own.attention is not None,
        )
        self.factors: Tensor | None = None
        if own.multipliers is not None:
            self.factors = load.empty(sum(map(len, shards)))
            pieces = self.factors.split([len(shard) for shard in shards])
            for piece, factor in zip(pieces, own.multipliers.projections, strict=True):
                piece.fill_(factor)
        self.conv, self.conv_bias = read_conv(
            load,
            f"{name}.conv1d",
            [
                (start - size + shard.start, len(shard))
                for start, shard in zip(starts[1:4], shards[1:4], strict=True)
            ],
            own.width,
            num_channels=size + 2 * grouped,
            bias=own.conv_bias,
        )
        self.negative_a = -read_float32(load, f"{name}.A_log", heads).exp()
        self.step_bias = read_float32(load, f"{name}.dt_bias", heads)
        self.skip = load.part(f"{name}.D", heads).view(-1, 1)
        self.norm: ShardedGroupNorm | None = None
        if own.norm is not None:
            self.norm = ShardedGroupNorm(load, f"{name}.norm", size, own.num_groups, own.norm_eps)
        self.output = RowParallelLinear(load, f"{name}.out_proj", size, spec.hidden_size, own.output_bias)

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        own = self.spec
        projected = self.qkv.forward(x)
        if self.factors is not None:
            projected = projected * self.factors
        gate, mixed, steps = projected.split([self._inner_len, len(self.conv), self._heads], dim=1)
        mixed = runs.compute(causal_conv, mixed, self.conv, self.conv_bias, states=states[0], silu=True)
        inner, b, c = mixed.split([self._inner_len, self._group_len, self._group_len], dim=1)
        inner = inner.view(len(inner), self._heads, own.head_dim)
        b, c = (part.view(len(inner), -1, own.state_size) for part in (b, c))
        step = F.softplus(steps.float() + self.step_bias)
        if own.min_step or own.max_step is not None:
            step = step.clamp(own.min_step, own.max_step)
        y = runs.compute(
            linear_attention, c, b, inner, step * self.negative_a, step, states=states[1], delta=False
        )
        out = y.addcmul_(inner, self.skip).flatten(1)
        gate = F.silu(gate)
        if self.norm is None:
            out *= gate
        elif own.norm == "gate":
            out = self.norm.apply(out.mul_(gate))
        else:
            out = self.norm.apply(out).mul_(gate)
        return self.output.forward_partial(out)


class Mamba2BesideAttention(StateMixer):
    """Mamba 2 and attention to the same input, whose results are added (Falcon-H1, 2025)."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: Mamba2Spec, name: str) -> None:
        assert own.attention is not None
        load = replace(load, peers=None)  # the results are added before the next norm
        self._factors = own.multipliers or Multipliers()
        self.mamba = Mamba2(load, spec, own, name)
        layer, num_heads = name.rpartition(".")[0], len(load.head_shard(own.attention.num_heads, 1))
        self.attention = Attention(load, spec, own.attention, f"{layer}.{spec.names.attention}")
        if self._factors.keys != 1.0:
            keys = slice(num_heads, num_heads + len(load.head_shard(own.attention.num_kv_heads, 1)))
            self.attention.steps.append(ConstantFactor(keys, self._factors.keys))
        self.qkv = self.mamba.qkv

    def forward(
        self, x: Tensor | Float8Tokens, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        assert isinstance(x, Tensor)
        assert inputs.states is not None
        mixed = self.mix(x, inputs.states.layers[self.layer], inputs.states.runs)
        if self._factors.attention_input != 1.0:
            x = x * self._factors.attention_input
        attended = self.attention.forward(x, rotations, kv_cache, inputs)
        assert isinstance(mixed, Tensor)  # without peers no sum is deferred
        assert isinstance(attended, Tensor)
        return mixed.mul_(self._factors.output).add_(attended, alpha=self._factors.attention_output)

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        """Return the recurrence's part."""
        return self.mamba.mix(x, states, runs)
