"""HeadStep: a change of the heads of queries, keys and values before attention, which few models have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ....kernels.rope import apply_rope
from ....proto.model.attention import QueryTemperature
from ...comm.shard import Shard
from ..layers import LayerNorm, Rotations
from ..load_context import LoadContext

# Key of Rotations |-> factors of queries, [T, 1, 1].
TEMPERATURE = "temperature"
# Key of Rotations |-> logarithms of the numbers of tokens up to each, [T, 1, 1].
LOGARITHM = "logarithm"


class HeadStep(Protocol):
    """A change of this rank's heads."""

    def apply(self, heads: Tensor, rotations: Rotations) -> None:
        """Change the heads of queries, keys and values, [T, Hq + 2 Hkv, D], in place."""
        ...


class WholeProjectionNorm:
    """RMSNorm over all outputs of a projection that is sharded over the ranks.

    Args:
        shard: this rank's part of the outputs; ranks that hold the same part all count in the mean.
        start: of the part among the elements of all heads.
    """

    def __init__(self, load: LoadContext, name: str, shard: Shard, start: int, eps: float) -> None:
        self._comm, self._eps, self._length = load.comm, eps, len(shard)
        self._place = slice(start, start + len(shard))
        self._weight = load.part(f"{name}.weight", shard)

    def apply(self, heads: Tensor, rotations: Rotations) -> None:
        x = heads.flatten(1)[:, self._place]
        squares = self._comm.all_reduce(x.float().square().sum(dim=-1, keepdim=True))
        scale = torch.rsqrt(squares / (self._length * self._comm.size) + self._eps)
        x.copy_(x.float().mul_(scale).mul_(self._weight))


@dataclass(frozen=True, slots=True)
class HeadLayerNorm:
    """LayerNorm of the heads from `start` on, with weights for each."""

    norm: LayerNorm
    start: int

    def apply(self, heads: Tensor, rotations: Rotations) -> None:
        own = heads[:, self.start : self.start + len(self.norm.weight)]
        own.copy_(self.norm.apply(own))


@dataclass(frozen=True, slots=True)
class QueryFactors:
    """Multiplies the first heads, the queries, by the factors of their tokens."""

    num_heads: int

    def apply(self, heads: Tensor, rotations: Rotations) -> None:
        factors, _ = rotations[TEMPERATURE]
        assert factors is not None
        heads[:, : self.num_heads] *= factors


@dataclass(frozen=True, slots=True)
class ConstantFactor:
    """Multiplies some heads by a constant."""

    heads: slice
    factor: float

    def apply(self, heads: Tensor, rotations: Rotations) -> None:
        heads[:, self.heads] *= self.factor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotates the first heads, queries and keys, before they are normalized."""

    rope: str | None
    num_heads: int

    def apply(self, heads: Tensor, rotations: Rotations) -> None:
        cos, sin = rotations[self.rope]
        if cos is not None and sin is not None:
            apply_rope(heads[:, : self.num_heads], cos, sin)


class LearnedFactors:
    """Factors of queries, ``slope * log(p + 1) + offset`` of each head (Nakanishi, *Scalable-Softmax*, 2025).

    Args:
        heads: of these queries, among those of all ranks.
    """

    def __init__(self, load: LoadContext, name: str, heads: Shard) -> None:
        self._slope, self._offset = (
            load.part(f"{name}.{own}", heads).float().unsqueeze(1) for own in ("scale", "bias")
        )

    def apply(self, q: Tensor, rotations: Rotations) -> None:
        """Multiply queries in place, [T, H, D]."""
        logarithms, _ = rotations[LOGARITHM]
        assert logarithms is not None
        q *= logarithms * self._slope + self._offset


class LogarithmTable:
    """The logarithm of the number of tokens up to each position, [P] float32."""

    def __init__(self, load: LoadContext, num_positions: int) -> None:
        self._table = torch.arange(1, num_positions + 1, dtype=torch.float32).log().to(load.device)

    def at(self, positions: Tensor) -> Tensor:
        """[T] -> [T, 1, 1]."""
        return self._table.index_select(0, positions).view(-1, 1, 1)


class TemperatureTable:
    """The factor of queries for every position, [P] float32; see QueryTemperature."""

    def __init__(self, load: LoadContext, temperature: QueryTemperature, num_positions: int) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32) + temperature.offset
        steps = torch.floor(positions / temperature.interval)
        self._table = (1 + temperature.scale * torch.log1p(steps)).to(load.device)

    def at(self, positions: Tensor) -> Tensor:
        """[T] -> [T, 1, 1]."""
        return self._table.index_select(0, positions).view(-1, 1, 1)
