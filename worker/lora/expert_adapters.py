"""ExpertAdapters: the adapters of a mixture's experts.

A choice of expert x by a token whose adapter is in slot s uses the factors of row ``s * X + x``. So the op of
ordinary linear layers computes the adapters of all experts at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.lora import LoraGroups, group_rows
from ...kernels.moe import ExpertChoices
from .layers import Adapted, LoraLayers


class ChoiceAdapters:
    """The adapters of one step's P choices of experts.

    Args:
        groups: entries of the choices' order, by row of the layers' factors.
    """

    def __init__(
        self,
        gate_up: Adapted,
        down: Adapted,
        choices: ExpertChoices,
        groups: LoraGroups,
    ) -> None:
        self._gate_up, self._down = gate_up, down
        self._choices, self._groups = choices, groups

    def add_gate_up(self, y: Tensor, x: Tensor) -> None:
        """Add to the outputs of the gate and up projections, in place.

        Args:
            y: [P, 2 I], by expert.
            x: [P, E], by expert.
        """
        self._gate_up.add_rows(y, x, self._groups)

    def scatter_gate_up(self, y: Tensor, x: Tensor) -> None:
        """As `add_gate_up`, with one input per token.

        Args:
            x: [T, E].
        """
        tokens = self._choices.order[self._groups.order] // self._choices.top_k
        self._gate_up.add_rows(y, x, replace(self._groups, inputs=tokens))

    def add_down(self, y: Tensor, x: Tensor) -> None:
        """Add to the outputs of the down projections, in place.

        Args:
            y: [P, E], by expert.
            x: [P, I], by expert.
        """
        self._down.add_rows(y, x, self._groups)

    def add_terms(self, y: Tensor, x: Tensor, factors: Tensor) -> None:
        """As `add_down`, to outputs by choice that are multiplied by their factors.

        Args:
            factors: [T, top_k] float32.
        """
        order, rows = self._choices.order, self._groups.order
        scaled = x * factors.view(-1, 1).index_select(0, order).to(x.dtype)
        self._down.add_rows(y, scaled, replace(self._groups, order=order[rows], inputs=rows))


class ExpertAdapters:
    """The adapters of the two layers of a mixture's experts.

    Args:
        gate_up, down: the layers of this rank's X experts.
        num_experts: X.
    """

    def __init__(self, model: LoraLayers, gate_up: Adapted, down: Adapted, num_experts: int) -> None:
        self._model, self._num_experts = model, num_experts
        self.gate_up, self.down = gate_up, down

    def of_choices(self, choices: ExpertChoices, token_slots: Tensor) -> ChoiceAdapters:
        """Return the adapters of the choices of some tokens.

        Args:
            token_slots: [T] int32, the slot of each token's adapter; negative for none.
        """
        order, num_experts = choices.order, self._num_experts
        places = torch.arange(len(order), dtype=torch.int32, device=order.device)
        experts = torch.searchsorted(choices.starts[1:], places, right=True)
        slots = token_slots[order // choices.top_k]
        has_adapter = (slots >= 0) & (experts < num_experts)
        rows = torch.where(has_adapter, slots * num_experts + experts, -1)
        groups = group_rows(rows, self._model.num_slots * num_experts)
        return ChoiceAdapters(self.gate_up, self.down, choices, groups)
