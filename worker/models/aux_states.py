"""AuxStates: hidden states between layers, which a draft head reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AuxStates:
    """Collects the input of some layers in one forward pass.

    Attributes:
        layers: indices of the layers; the number of layers stands for the output of the last one.
        states: [T, E] of each of them by ascending index, or one [T, A E] of all of them.
    """

    layers: frozenset[int]
    states: list[Tensor] = field(default_factory=list)

    def allocate(self, hidden: Tensor) -> Tensor:
        """Return memory for all states of tokens with hidden states [T, E], [T, A E]; the caller fills it."""
        features = hidden.new_empty(len(hidden), len(self.layers) * hidden.shape[1])
        self.states.append(features)
        return features

    def join(self) -> Tensor:
        """Return the states side by side, [T, A E]."""
        return self.states[0] if len(self.states) == 1 else torch.cat(self.states, dim=-1)
