"""AdaptedExperts: experts whose layers run one after the other, for tokens with adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ....kernels.activation import GatedActivation
from ....kernels.moe import sort_choices
from ...lora.expert_adapters import ExpertAdapters
from ...weights.linear_weight import LinearWeight


class ExpertsForward(Protocol):
    """Experts without adapters."""

    def forward(self, x: Tensor, factors: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the sum of this rank's experts' results, [T, E]; see moe.ExpertLayers."""
        ...


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """The experts of a layer: tokens without an adapter pass `plain`, with the same bits in every step.

    Attributes:
        gate_up, down, activation, num_experts, first_expert, gate_up_bias, down_bias, scaled_inputs: as in
            moe.ExpertLayers.
    """

    plain: ExpertsForward
    adapters: ExpertAdapters
    gate_up: Sequence[LinearWeight]
    down: Sequence[LinearWeight]
    activation: GatedActivation
    num_experts: int
    first_expert: int
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    scaled_inputs: bool

    def forward(self, x: Tensor, factors: Tensor, expert_ids: Tensor) -> Tensor:
        """As ExpertLayers; reads on the host which tokens have an adapter."""
        slots = self.adapters.token_slots
        if slots is None:
            return self.plain.forward(x, factors, expert_ids)
        has_adapter = slots >= 0
        if has_adapter.all():
            return self._forward_adapted(x, factors, expert_ids, slots)
        y = torch.empty_like(x)
        own = has_adapter.nonzero().flatten()
        y[own] = self._forward_adapted(x[own], factors[own], expert_ids[own], slots[own])
        others = (~has_adapter).nonzero().flatten()
        y[others] = self.plain.forward(x[others], factors[others], expert_ids[others])
        return y

    def _forward_adapted(self, x: Tensor, factors: Tensor, expert_ids: Tensor, slots: Tensor) -> Tensor:
        """As `forward`, for tokens that all have adapters."""
        held = range(self.first_expert, self.first_expert + len(self.down))
        choices = sort_choices(expert_ids, self.num_experts, held)
        own = self.adapters.of_choices(choices, slots)
        counts = choices.starts.diff().tolist()
        order = choices.order[: sum(counts)]
        if not len(order):
            return torch.zeros_like(x)
        tokens = order // choices.per_token
        inputs, by_expert = x[tokens], factors.to(x.dtype).view(-1, 1)[order]
        if self.scaled_inputs:
            inputs *= by_expert
        gate_up = _multiply_each(self.gate_up, inputs, counts, self.gate_up_bias)
        own.add_gate_up(gate_up, inputs)
        inner = self.activation(gate_up)
        out = _multiply_each(self.down, inner, counts, self.down_bias)
        own.add_down(out, inner)
        return torch.zeros_like(x).index_add_(0, tokens, out if self.scaled_inputs else out.mul_(by_expert))


def _multiply_each(
    weights: Sequence[LinearWeight], x: Tensor, counts: list[int], biases: Tensor | None
) -> Tensor:
    """Multiply the rows [P, K] of each expert, `counts[i]` of expert i, by its weight: [P, N]."""
    parts = zip(weights, x.split_with_sizes(counts), strict=True)
    return torch.cat(
        [
            weight.multiply(part, None if biases is None else biases[index])
            for index, (weight, part) in enumerate(parts)
            if len(part)
        ]
    )
