"""Layers of a decoder; each rank computes its part, read from the checkpoint by the constructor.

A column-parallel layer shards its outputs over the ranks, a row-parallel one its inputs (Shoeybi et al., Megatron-LM,
2019). The all-reduce of partial sums is a line in `forward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.activation import GATED_ACTIVATIONS
from ...kernels.norm import rms_norm
from ...kernels.quantized_linear import Float8Tokens
from ...proto.model.rope import Rope
from ..comm.shard import Shard
from ..weights.linear_weight import Float8Weight, LinearWeight, PlainWeight
from ..weights.weight_slice import RowOrder, WeightSlice
from .load_context import LoadContext

# Rope key |-> cosines and sines of a step's tokens; the key None is for layers without positions. Further keys have
# other numbers of the tokens, which some layers read.
Rotations = Mapping[str | None, tuple[Tensor | None, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Projection:
    """Outputs of a linear layer that are sharded over the ranks.

    Attributes:
        name: of the stored layer, without ``.weight``.
        shard: this rank's part of the outputs.
        start, stored_len: for a stored layer that concatenates several projections, the first output of this one and
            the number of outputs of all; `stored_len` is None if the layer stores this projection alone.
        interleaving: of this rank's outputs in the checkpoint; None if they are in order.
    """

    name: str
    shard: Shard
    start: int = 0
    stored_len: int | None = None
    interleaving: RowOrder | None = None

    @property
    def num_stored(self) -> int:
        return self.shard.full_len if self.stored_len is None else self.stored_len


class ColumnParallelLinear:
    """Several projections of the same input as one matmul; each rank computes its part of the outputs of each.

    Args:
        in_features: E.
        shares_input: other layers read the same input in full precision.
    """

    def __init__(
        self,
        load: LoadContext,
        projections: Sequence[Projection],
        in_features: int,
        bias: bool,
        *,
        shares_input: bool = False,
    ) -> None:
        self._shares_input = shares_input
        parts = [
            WeightSlice(
                own.name,
                (own.num_stored, in_features),
                0,
                own.start + own.shard.start,
                len(own.shard),
                own.interleaving,
            )
            for own in projections
        ]
        self.weight = load.linear_layer(parts)
        self.lora = load.adapters(parts)
        self.bias = load.empty(sum(part.length for part in parts)) if bias else None
        if self.bias is not None:
            pieces = self.bias.split_with_sizes([part.length for part in parts])
            for piece, part in zip(pieces, parts, strict=True):
                load.checkpoint.read_into(piece, f"{part.name}.bias", part.shape[:1], 0, part.start)
                if part.interleaving is not None:
                    piece.copy_(part.interleaving.reorder(piece))

    @property
    def accepts_float8(self) -> bool:
        """True if the layer multiplies in float8, so that its input may be quantized already.

        Adapters multiply the input in full precision.
        """
        return isinstance(self.weight, Float8Weight) and not (self.lora.factors or self._shares_input)

    def forward(self, x: Tensor | Float8Tokens) -> Tensor:
        """[T, E] -> [T, sum of this rank's outputs]."""
        if isinstance(x, Float8Tokens):
            assert isinstance(self.weight, Float8Weight)
            return self.weight.multiply(x, self.bias)
        y = self.weight.multiply(x, self.bias)
        self.lora.add(y, x)
        return y

    def forward_gated(self, x: Tensor | Float8Tokens, gate: str) -> Tensor:
        """[T, E] -> [T, I]: the gated activation (kernels.activation) of a gate and an up projection."""
        if isinstance(self.weight, PlainWeight) and isinstance(x, Tensor) and not self.lora.is_active:
            return self.weight.multiply_gated(x, gate, self.bias)
        return GATED_ACTIVATIONS[gate](self.forward(x))


class PartialSum(NamedTuple):
    """This rank's addend of a sum over the ranks that is still to be computed, [T, E]."""

    part: Tensor


class RowParallelLinear:
    """A projection whose inputs are sharded over the ranks; an all-reduce adds the partial sums."""

    def __init__(self, load: LoadContext, name: str, in_features: int, out_features: int, bias: bool) -> None:
        self.comm = load.comm
        self.max_partial_tokens = 0 if load.peers is None or bias else load.peers.max_tokens
        shard = load.shard(in_features)
        parts = [WeightSlice(name, (out_features, in_features), 1, shard.start, len(shard))]
        self.weight = load.linear_layer(parts)
        self.lora = load.adapters(parts)
        self.bias = load.replicated(f"{name}.bias", out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, this rank's inputs] -> [T, E], the same on every rank."""
        return self.sum(self.multiply(x))

    def forward_partial(self, x: Tensor) -> Tensor | PartialSum:
        """As `forward`, but the sum of at most `max_partial_tokens` tokens is deferred to the consumer."""
        y = self.multiply(x)
        return PartialSum(y) if 0 < len(y) <= self.max_partial_tokens else self.sum(y)

    def multiply(self, x: Tensor) -> Tensor:
        """Return this rank's addend, without the bias, with those of the adapters."""
        y = self.weight.multiply(x)
        self.lora.add(y, x)
        return y

    def sum(self, part: Tensor) -> Tensor:
        """Add the partial sums of all ranks and the bias."""
        y = self.comm.all_reduce(part)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm over the last dimension (Ba et al., 2016).

    Attributes:
        weight, bias: [E], or of several last dimensions; without a bias None.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float

    def apply(self, x: Tensor) -> Tensor:
        """Return the normalized tensor."""
        if self.weight.dim() == 1:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        normed = F.layer_norm(x, self.weight.shape[-1:], None, None, self.eps)
        return normed * self.weight if self.bias is None else normed * self.weight + self.bias


@dataclass(frozen=True, slots=True)
class ScaledNorm:
    """RMSNorm without weights, of numbers that are multiplied by stored factors before.

    Attributes:
        factors, ones: [E], of the numbers and the weights of the norm.
    """

    factors: Tensor
    ones: Tensor
    eps: float

    @staticmethod
    def read(load: LoadContext, name: str, size: int, eps: float) -> ScaledNorm:
        """Return the norm of a checkpoint, which stores the factors less 1."""
        return ScaledNorm(load.norm(name, size, 1.0), load.empty(size).fill_(1), eps)

    def apply(self, x: Tensor) -> Tensor:
        """Return the normalized tensor."""
        return rms_norm(x * self.factors, self.ones, self.eps)


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """RMSNorm whose result is multiplied by a gate, the sigmoid of a small network that reads it.

    Attributes:
        weight: [E], of the norm.
        down, up: layers of the network, to its inner numbers and back.
    """

    weight: Tensor
    down: LinearWeight
    up: LinearWeight
    eps: float

    @staticmethod
    def read(load: LoadContext, name: str, size: int, rank: int, eps: float) -> GatedNorm:
        """Return the norm of a checkpoint, which every rank holds in full."""
        down, up = (
            load.linear([WeightSlice(f"{name}.mlp.{own}", shape, 0, 0, shape[0])], allow_online=False)
            for own, shape in (("fc1", (rank, size)), ("fc2", (size, rank)))
        )
        return GatedNorm(load.norm(f"{name}.norm", size), down, up, eps)

    def apply(self, x: Tensor) -> Tensor:
        """Return the normalized tensor."""
        normed = rms_norm(x, self.weight, self.eps)
        return normed * self.up.multiply(F.silu(self.down.multiply(normed))).sigmoid()


class RotaryTable:
    """Cosines and sines of every position, in the layout of kernels.rope.

    Attributes:
        table: [P, 2, R].
        axes: [R] int64, whether a token's time, row or column rotates a number of a head; None if each token has one
            position.
    """

    def __init__(self, load: LoadContext, rope: Rope, num_positions: int) -> None:
        self.table = load.keep(
            f"rotary table of {num_positions} positions, {rope}",
            lambda: _rotary_table(load, rope, num_positions).to(load.device, load.dtype),
        )

        self.axes = torch.tensor(rope.axes() * 2, device=load.device) if rope.sections else None

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] or [3, T] -> cosines and sines, each [T, R], where R dimensions of a head are rotated."""
        if positions.dim() > 1:
            assert self.axes is not None, "positions of several dimensions rotate by one"
            found = self.table[positions]  # [3, T, 2, R]
            index = self.axes.expand(1, *found.shape[1:])
            cos, sin = found.gather(0, index)[0].unbind(1)
            return cos.contiguous(), sin.contiguous()
        cos, sin = self.table.index_select(0, positions).unbind(1)
        return cos, sin


def _rotary_table(load: LoadContext, rope: Rope, num_positions: int) -> Tensor:
    frequencies = torch.tensor(rope.frequencies, dtype=torch.float32)
    if rope.exponents:
        exponents = torch.empty_like(frequencies)
        load.checkpoint.read_into(exponents, rope.exponents, exponents.shape)
        frequencies *= exponents.exp()
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
