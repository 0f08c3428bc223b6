"""Replicas: the slots of a layer's experts, of which some are on several ranks, and the load of each expert."""

from __future__ import annotations

import torch
from torch import Tensor

from ....proto.model.expert_placement import Placement, first_placement


class OneReplica:
    """Each expert has the slot of its number, and stays there."""

    def choose(self, expert_ids: Tensor) -> Tensor:
        """Return the slots of chosen experts, [N, K]."""
        return expert_ids


class Replicas:
    """The placement of one layer's experts, the same on all ranks.

    Args:
        num_ranks: that an expert may be on at most.
        own: this rank's slots.

    Attributes:
        placement: expert of each slot.
        loads: [X] float32, how often this rank's own tokens have chosen each expert.
    """

    def __init__(
        self, num_experts: int, num_slots: int, rank: int, num_ranks: int, own: range, device: torch.device
    ) -> None:
        self._rank, self.num_ranks, self.own = rank, num_ranks, own
        self.loads = torch.zeros(num_experts, device=device)
        # Fixed memory, which recorded steps read.
        self._slots = torch.zeros(num_experts, num_ranks, dtype=torch.int64, device=device)
        self._counts = torch.ones(num_experts, dtype=torch.int64, device=device)
        self.placement: Placement = ()
        self.place(first_placement(num_experts, num_slots))

    def choose(self, expert_ids: Tensor) -> Tensor:
        """Return the slots of chosen experts, [N, K], and count them. The replicas of an expert take turns."""
        chosen = expert_ids.flatten()
        self.loads.scatter_add_(0, chosen, self.loads.new_ones(len(chosen)))  # the host reads nothing
        turns = torch.arange(self._rank, self._rank + len(expert_ids), device=expert_ids.device).unsqueeze(1)
        return self._slots[expert_ids, turns % self._counts[expert_ids]]

    def place(self, placement: Placement) -> None:
        """Send tokens by another placement from now on; all ranks do so between the same two steps."""
        slots: dict[int, list[int]] = {}
        for slot, expert in enumerate(placement):
            slots.setdefault(expert, []).append(slot)
        rows = [slots[expert] for expert in range(len(self.loads))]
        self._counts.copy_(torch.tensor([len(row) for row in rows]))
        self._slots.copy_(torch.tensor([row + row[:1] * (self.num_ranks - len(row)) for row in rows]))
        self.placement = placement
