"""GatedDeltaNet: linear attention with the gated delta rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.norm import rms_norm
from ....kernels.quantized_linear import Float8Tokens
from ....kernels.recurrence import causal_conv
from ....kernels.state_runs import StateRuns
from ....proto.model.gated_delta import GatedDeltaSpec
from ....proto.model.spec import DecoderSpec
from ...comm.shard import Shard
from ...weights.weight_slice import Regrouping
from ..layers import ColumnParallelLinear, PartialSum, Projection, RowParallelLinear
from ..load_context import LoadContext
from .state_mixer import L2_EPS, StateMixer, read_conv, read_float32


class GatedDeltaNet(StateMixer):
    """A gated delta net; each rank computes its part of the heads.

    The projection has queries, keys, values and output gates; another one has the rates and the decays.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: GatedDeltaSpec, name: str) -> None:
        self.spec, self._delta_rule = own, load.recurrence_backend.delta_rule
        self._activate = _GATES[own.gate]
        keys, values = (
            load.head_shard(own.num_key_heads, own.key_dim),
            load.shard(own.num_heads * own.value_dim),
        )
        heads = load.shard(own.num_heads)
        self._key_heads, self._heads = len(keys) // own.key_dim, len(heads)
        projections, rates = _PROJECTIONS[own.layout](load, own, name)
        self.qkv = ColumnParallelLinear(load, projections, spec.hidden_size, bias=False, shares_input=True)
        self.rates = ColumnParallelLinear(load, rates, spec.hidden_size, bias=False, shares_input=True)
        total = own.num_key_heads * own.key_dim
        shards = (0, keys), (total, keys), (2 * total, values)
        self.conv, _ = read_conv(
            load,
            f"{name}.conv1d",
            [(start + shard.start, len(shard)) for start, shard in shards],
            own.width,
            num_channels=2 * total + values.full_len,
            separate=[f"{name}.{part}_conv1d" for part in "qkv"],
        )
        self._conv_len = len(self.conv)
        self.negative_a = -read_float32(load, f"{name}.A_log", heads).exp()
        self.step_bias = read_float32(load, f"{name}.dt_bias", heads)
        self.norm = load.norm(f"{name}.{own.norm_name}", own.value_dim)
        # A norm of the sum of squares, by the op for that of their mean.
        self._l2_weight = load.empty(own.key_dim).fill_(own.key_dim**-0.5)
        self.output = RowParallelLinear(
            load, f"{name}.{own.output_name}", own.num_heads * own.value_dim, spec.hidden_size, bias=False
        )

    def mix(self, x: Tensor | Float8Tokens, states: Sequence[Tensor], runs: StateRuns) -> Tensor | PartialSum:
        """[T, E] -> [T, E]."""
        own, num_heads = self.spec, self._heads
        projected, rates = self.qkv.forward(x), self.rates.forward(x).float()
        mixed = runs.compute(
            causal_conv, projected[:, : self._conv_len], self.conv, None, states=states[0], silu=True
        )
        num_keys = self._key_heads * own.key_dim
        qk = mixed[:, : 2 * num_keys].view(len(mixed), -1, own.key_dim)
        q, k = rms_norm(qk, self._l2_weight, L2_EPS / own.key_dim).chunk(2, dim=1)
        v = mixed[:, 2 * num_keys :].view(len(mixed), num_heads, own.value_dim)
        beta = rates[:, :num_heads].sigmoid()
        if own.beta_scale != 1.0:
            beta *= own.beta_scale
        decay = F.softplus(rates[:, num_heads:] + self.step_bias) * self.negative_a
        attended = runs.compute(
            self._delta_rule, q, k, v, decay, beta, states=states[1], scale=own.key_dim**-0.5
        )
        normed = rms_norm(attended, self.norm, own.norm_eps)
        gate = projected[:, self._conv_len :].view(len(mixed), num_heads, own.value_dim)
        return self.output.forward_partial((normed * self._activate(gate)).flatten(1))


def _grouped(load: LoadContext, own: GatedDeltaSpec, name: str) -> tuple[list[Projection], list[Projection]]:
    """Return the projections of Qwen3-Next: the rows of each key head with those of its value heads."""
    share = own.num_heads // own.num_key_heads
    sizes = own.key_dim, own.key_dim, share * own.value_dim, share * own.value_dim
    stored, run_len = f"{name}.in_proj_qkvz", sum(sizes)
    num_heads, key_heads = len(load.shard(own.num_heads)), load.head_shard(own.num_key_heads, 1)
    if num_heads >= share:
        return (
            [
                Projection(
                    stored,
                    load.shard(own.num_key_heads * run_len),
                    interleaving=Regrouping(sizes, (0, 1, 2, 3)),
                )
            ],
            [
                Projection(
                    f"{name}.in_proj_ba",
                    load.shard(2 * own.num_heads),
                    interleaving=Regrouping((share, share), (0, 1)),
                )
            ],
        )
    # Several ranks share a key head; each has some of its value heads.
    first_head = load.shard(own.num_heads).start % share
    run, length = key_heads.start * run_len, own.num_key_heads * run_len
    first, values = first_head * own.value_dim, num_heads * own.value_dim
    starts = [0, own.key_dim, 2 * own.key_dim + first, 2 * own.key_dim + share * own.value_dim + first]
    lens = [own.key_dim, own.key_dim, values, values]
    rates = [key_heads.start * 2 * share + first_head + part * share for part in range(2)]
    return (
        [
            Projection(stored, Shard(0, 1, size), run + start, length)
            for start, size in zip(starts, lens, strict=True)
        ],
        [
            Projection(f"{name}.in_proj_ba", Shard(0, 1, num_heads), start, 2 * own.num_heads)
            for start in rates
        ],
    )


def _in_parts(load: LoadContext, own: GatedDeltaSpec, name: str) -> tuple[list[Projection], list[Projection]]:
    """Return the projections of Qwen3.5."""
    keys, values = load.head_shard(own.num_key_heads, own.key_dim), load.shard(own.num_heads * own.value_dim)
    total, heads = own.num_key_heads * own.key_dim, load.shard(own.num_heads)
    stored, length = f"{name}.in_proj_qkv", 2 * total + values.full_len
    return (
        [
            Projection(stored, keys, 0, length),
            Projection(stored, keys, total, length),
            Projection(stored, values, 2 * total, length),
            Projection(f"{name}.in_proj_z", values),
        ],
        [Projection(f"{name}.in_proj_{part}", heads) for part in "ba"],
    )


def _separate(load: LoadContext, own: GatedDeltaSpec, name: str) -> tuple[list[Projection], list[Projection]]:
    """Return the projections of OLMo Hybrid."""
    keys, values = load.head_shard(own.num_key_heads, own.key_dim), load.shard(own.num_heads * own.value_dim)
    heads = load.shard(own.num_heads)
    shards = {"q": keys, "k": keys, "v": values, "g": values}
    return (
        [Projection(f"{name}.{part}_proj", shard) for part, shard in shards.items()],
        [Projection(f"{name}.{part}_proj", heads) for part in "ba"],
    )


# GatedDeltaSpec.gate |-> activation.
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
_PROJECTIONS = {"grouped": _grouped, "parts": _in_parts, "separate": _separate}
