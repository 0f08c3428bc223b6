"""AuxStates: hidden states between layers, which a draft head reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AuxStates:
    """Collects the input of some layers in one forward pass.

    Attributes:
        layers: indices of the layers; the number of layers stands for the output of the last one.
        states: [T, E] of each of them, by ascending index.
    """

    layers: frozenset[int]
    states: list[Tensor] = field(default_factory=list)
