"""KimiDeltaAttention: the delta rule with a decay per key channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.recurrence import causal_conv
from ....kernels.state_runs import StateRuns
from ....proto.model.kimi_delta import KimiDeltaSpec
from ....proto.model.spec import DecoderSpec
from ...comm.shard import Shard
from ..layers import ColumnParallelLinear, PartialSum, Projection, RowParallelLinear
from ..load_context import LoadContext
from .state_mixer import L2_EPS, StateMixer, read_conv, read_float32


class KimiDeltaAttention(StateMixer):
    """Kimi delta attention; each rank computes its part of the heads."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: KimiDeltaSpec, name: str) -> None:
        self.spec, self._delta_rule = own, load.recurrence_backend.delta_rule
        size, heads = own.num_heads * own.head_dim, load.shard(own.num_heads)
        shard = load.shard(size)
        self._heads, self._inner_len = len(heads), len(shard)
        parts = [Projection(f"{name}.{part}_proj", shard) for part in "qkv"]
        low_rank = Shard(0, 1, own.head_dim)
        others = [Projection(f"{name}.b_proj", heads)]
        if own.is_low_rank:
            others += [Projection(f"{name}.{part}_a_proj", low_rank) for part in "fg"]
        else:
            others += [Projection(f"{name}.{part}_proj", shard) for part in "fg"]
        self.qkv = ColumnParallelLinear(load, parts, spec.hidden_size, bias=False, shares_input=True)
        self.others = ColumnParallelLinear(load, others, spec.hidden_size, bias=False, shares_input=True)
        self.second: list[ColumnParallelLinear] = []
        if own.is_low_rank:
            self.second = [
                ColumnParallelLinear(
                    load, [Projection(f"{name}.{part}_b_proj", shard)], own.head_dim, bias=False
                )
                for part in "fg"
            ]
        self.conv, _ = read_conv(
            load,
            f"{name}.conv1d",
            [(start + shard.start, len(shard)) for start in range(0, 3 * size, size)],
            own.width,
            num_channels=3 * size,
            separate=[f"{name}.{part}_conv1d" for part in "qkv"],
        )
        self.step_bias = read_float32(load, f"{name}.dt_bias", shard).view(-1, own.head_dim)
        self.rate = self._read_rates(load, f"{name}.A_log", heads).exp().view(-1, 1)
        self.norm = load.norm(f"{name}.o_norm", own.head_dim)
        self._l2_weight = load.empty(own.head_dim).fill_(own.head_dim**-0.5)
        self.output = RowParallelLinear(load, f"{name}.o_proj", size, spec.hidden_size, bias=False)

    def _read_rates(self, load: LoadContext, name: str, heads: Shard) -> Tensor:
        """Read the logarithms of this rank's rates, which have further dimensions of 1 in some checkpoints."""
        shape = load.checkpoint.shape_of(name)
        stored = torch.empty(shape, dtype=torch.float32, device=load.device)
        expected = tuple(self.spec.num_heads if length != 1 else 1 for length in shape)
        load.checkpoint.read_into(stored, name, expected)
        return stored.flatten()[heads.start : heads.end].clone()

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        own, num_heads, inner_len = self.spec, self._heads, self._inner_len
        projected, others = self.qkv.forward(x), self.others.forward(x)
        rates, others = others[:, :num_heads], others[:, num_heads:]
        decays, gates = others.chunk(2, dim=1)
        if self.second:
            decays, gates = (
                layer.forward(part) for layer, part in zip(self.second, (decays, gates), strict=True)
            )
        mixed = runs.compute(causal_conv, projected, self.conv, None, states=states[0], silu=True)
        qk = mixed[:, : 2 * inner_len].view(len(mixed), -1, own.head_dim)
        q, k = rms_norm(qk, self._l2_weight, L2_EPS / own.head_dim).chunk(2, dim=1)
        v = mixed[:, 2 * inner_len :].view(len(mixed), num_heads, own.head_dim)
        steps = decays.float().view(v.shape) + self.step_bias
        if own.decay_bound is None:
            decay = F.softplus(steps) * -self.rate
        else:
            decay = (steps * self.rate).sigmoid_().mul_(own.decay_bound)
        beta = rates.float().sigmoid()
        attended = runs.compute(
            self._delta_rule, q, k, v, decay, beta, states=states[1], scale=own.head_dim**-0.5
        )
        normed = rms_norm(attended, self.norm, own.norm_eps).flatten(1)
        return self.output.forward_partial(normed * gates.sigmoid())
