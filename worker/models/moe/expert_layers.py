"""ExpertLayers: the experts of a mixture one by one; AdaptedExperts: for tokens with and without adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ....kernels.activation import GatedActivation
from ....kernels.moe import sort_choices
from ...lora.expert_adapters import ExpertAdapters
from ...weights.linear_weight import LinearWeight
from ..layers import ScaledNorm

T = TypeVar("T")


class ExpertsForward(Protocol):
    """Experts without adapters."""

    def forward(self, x: Tensor, factors: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the sum of this rank's experts' results, [T, E]; see ExpertLayers."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The experts' layers one by one: for experts that neither kernels nor C++ ops multiply at once.

    Attributes:
        gate_up, down: of each of this rank's X experts.
        activation: [T, 2 I] -> [T, I].
        num_experts: of all ranks, each with its replicas.
        first_expert: index of this rank's first one.
        gate_up_bias, down_bias: [X, 2 I] and [X, E], or None.
        scaled_inputs: as in Experts.
        norm: of each expert's result; None for none.
    """

    gate_up: Sequence[LinearWeight]
    down: Sequence[LinearWeight]
    activation: GatedActivation
    num_experts: int
    first_expert: int = 0
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    scaled_inputs: bool = False
    norm: ScaledNorm | None = None

    def forward(self, x: Tensor, factors: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the sum of this rank's experts' results, [T, E]; reads the number of each's tokens on the host.

        Args:
            x: [T, E].
            factors, expert_ids: [T, top_k], of each token's experts, which may be those of other ranks.
        """
        top_k = expert_ids.shape[1]
        factors, expert_ids = factors.to(x.dtype).view(-1, 1), expert_ids.flatten()
        counts = expert_ids.bincount(minlength=self.num_experts).tolist()
        y = torch.zeros_like(x)
        # Choices sorted by expert; choice i was made by token i // top_k.
        by_expert = expert_ids.argsort(stable=True).split_with_sizes(counts)
        for index, own in enumerate(by_expert[self.first_expert :][: len(self.down)]):
            if len(own):
                tokens = own // top_k
                y.index_add_(0, tokens, self._run_expert(index, x[tokens], factors[own]))
        return y

    def with_experts(self, places: Sequence[int], others: ExpertLayers) -> ExpertLayers:
        """Return these experts with others in some of their places."""

        def mixed(own: Sequence[T], other: Sequence[T]) -> list[T]:
            taken = dict(zip(places, other, strict=True))
            return [taken.get(place, each) for place, each in enumerate(own)]

        def biases(own: Tensor | None, other: Tensor | None) -> Tensor | None:
            return None if own is None or other is None else torch.stack(mixed(list(own), list(other)))

        return replace(
            self,
            gate_up=mixed(self.gate_up, others.gate_up),
            down=mixed(self.down, others.down),
            gate_up_bias=biases(self.gate_up_bias, others.gate_up_bias),
            down_bias=biases(self.down_bias, others.down_bias),
        )

    def _run_expert(self, index: int, x: Tensor, factors: Tensor) -> Tensor:
        if self.scaled_inputs:
            x = x * factors
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[index]
        down_bias = None if self.down_bias is None else self.down_bias[index]
        inner = self.activation(self.gate_up[index].multiply(x, gate_up_bias))
        out = self.down[index].multiply(inner, down_bias)
        if self.norm is not None:
            out = self.norm.apply(out)
        return out if self.scaled_inputs else out.mul_(factors)


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """The experts of a layer: tokens without an adapter pass `plain`, with the same bits in every step.

    Attributes:
        plain: computes `layers` for tokens without an adapter.
    """

    plain: ExpertsForward
    adapters: ExpertAdapters
    layers: ExpertLayers

    def forward(self, x: Tensor, factors: Tensor, expert_ids: Tensor, slots: Tensor | None = None) -> Tensor:
        """As ExpertLayers; reads on the host which tokens have an adapter.

        Args:
            slots: [T] int32, of the tokens' LoRA adapters, see StepAdapters; None without any.
        """
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
        layers = self.layers
        held = range(layers.first_expert, layers.first_expert + len(layers.down))
        choices = sort_choices(expert_ids, layers.num_experts, held)
        own = self.adapters.of_choices(choices, slots)
        counts = choices.starts.diff().tolist()
        order = choices.order[: sum(counts)]
        if not len(order):
            return torch.zeros_like(x)
        tokens = order // choices.top_k
        inputs, by_expert = x[tokens], factors.to(x.dtype).view(-1, 1)[order]
        if layers.scaled_inputs:
            inputs *= by_expert
        gate_up = _multiply_each(layers.gate_up, inputs, counts, layers.gate_up_bias)
        own.add_gate_up(gate_up, inputs)
        inner = layers.activation(gate_up)
        out = _multiply_each(layers.down, inner, counts, layers.down_bias)
        own.add_down(out, inner)
        if layers.norm is not None:
            out = layers.norm.apply(out)
        return torch.zeros_like(x).index_add_(0, tokens, out if layers.scaled_inputs else out.mul_(by_expert))


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
