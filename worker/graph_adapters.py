"""GraphAdapters: the fixed buffers of the adapters of recorded steps."""

from __future__ import annotations

import torch

from ..kernels.lora import LoraGroups, max_groups
from ..proto.lora import NO_SLOT
from .lora.step_adapters import StepAdapters


class GraphAdapters:
    """Buffers for the adapters of up to `max_rows` decodes.

    A graph has as many groups as any mix of adapters of its rows can need; those that a step does not need are empty.

    Args:
        num_slots: adapters that a step may use.
    """

    def __init__(self, max_rows: int, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        num_groups = max_groups(max_rows, num_slots)
        self._order = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._starts = torch.zeros(num_groups + 1, dtype=torch.int32, device=device)
        self._slots = torch.zeros(num_groups, dtype=torch.int32, device=device)
        self._token_slots = torch.full((max_rows,), NO_SLOT, dtype=torch.int32, device=device)

    def of_rows(self, num_rows: int) -> StepAdapters:
        """Return the part of the buffers for a graph of that many decodes, all of which are sampled from."""
        num_groups = max_groups(num_rows, self._num_slots)
        groups = LoraGroups(self._order[:num_rows], self._starts[: num_groups + 1], self._slots[:num_groups])
        return StepAdapters(groups, self._token_slots[:num_rows], groups)

    def copy(self, step: StepAdapters, num_rows: int) -> None:
        """Copy the adapters of a step of up to `num_rows` decodes. Entries that no group refers to stay stale."""
        own, groups = self.of_rows(num_rows), step.groups
        num_tokens, num_groups = len(groups.order), len(groups.slots)
        own.groups.order[:num_tokens].copy_(groups.order)
        own.groups.starts[: num_groups + 1].copy_(groups.starts)
        own.groups.starts[num_groups + 1 :].fill_(num_tokens)
        own.groups.slots[:num_groups].copy_(groups.slots)
        own.token_slots[: len(step.token_slots)].copy_(step.token_slots)
        own.token_slots[len(step.token_slots) :].fill_(NO_SLOT)

    def clear(self) -> None:
        """Make all groups empty, so that no row has an adapter."""
        self._starts.zero_()
        self._token_slots.fill_(NO_SLOT)
