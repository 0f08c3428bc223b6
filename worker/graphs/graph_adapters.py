"""GraphAdapters: the fixed buffers of the adapters of recorded steps."""

from __future__ import annotations

import torch

from ...kernels.lora import LoraGroups, max_groups
from ...proto.lora import NO_SLOT
from ..lora.step_adapters import StepAdapters


class GraphAdapters:
    """Buffers for the adapters of up to `max_rows` decodes.

    A graph has as many groups as any mix of adapters of its rows can need; those that a step does not need are empty.

    Args:
        num_slots: adapters that a step may use.
        dp_attention: a rank attends for some of the rows only.
    """

    def __init__(
        self, max_rows: int, num_slots: int, device: torch.device, *, dp_attention: bool = False
    ) -> None:
        self._groups = _Groups(max_rows, num_slots, device)
        self._own = _Groups(max_rows, num_slots, device) if dp_attention else self._groups
        self._token_slots = torch.full((max_rows,), NO_SLOT, dtype=torch.int32, device=device)

    def of_rows(self, num_rows: int) -> StepAdapters:
        """Return the part of the buffers for a graph of that many decodes, all of which are sampled from."""
        groups = self._groups.of_rows(num_rows)
        return StepAdapters(groups, self._token_slots[:num_rows], groups, self._own.of_rows(num_rows))

    def copy(self, step: StepAdapters, num_rows: int) -> None:
        """Copy the adapters of a step of up to `num_rows` decodes. Entries that no group refers to stay stale."""
        self._groups.copy(step.groups, num_rows)
        if self._own is not self._groups:
            self._own.copy(step.own, num_rows)
        assert step.token_slots is not None, "the step has no adapters"
        token_slots = self._token_slots[:num_rows]
        token_slots[: len(step.token_slots)].copy_(step.token_slots)
        token_slots[len(step.token_slots) :].fill_(NO_SLOT)

    def clear(self) -> None:
        """Make all groups empty, so that no row has an adapter."""
        self._groups.clear()
        self._own.clear()
        self._token_slots.fill_(NO_SLOT)


class _Groups:
    """Buffers for LoraGroups of up to `max_rows` tokens."""

    def __init__(self, max_rows: int, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        num_groups = max_groups(max_rows, num_slots)
        self._order = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._starts = torch.zeros(num_groups + 1, dtype=torch.int32, device=device)
        self._slots = torch.zeros(num_groups, dtype=torch.int32, device=device)

    def of_rows(self, num_rows: int) -> LoraGroups:
        num_groups = max_groups(num_rows, self._num_slots)
        return LoraGroups(self._order[:num_rows], self._starts[: num_groups + 1], self._slots[:num_groups])

    def copy(self, groups: LoraGroups | None, num_rows: int) -> None:
        """Copy groups of up to `num_rows` tokens; None for none."""
        own = self.of_rows(num_rows)
        if groups is None:
            own.starts.zero_()
            return
        num_tokens, num_groups = len(groups.order), len(groups.slots)
        own.order[:num_tokens].copy_(groups.order)
        own.starts[: num_groups + 1].copy_(groups.starts)
        own.starts[num_groups + 1 :].fill_(num_tokens)
        own.slots[:num_groups].copy_(groups.slots)

    def clear(self) -> None:
        """Make all groups empty."""
        self._starts.zero_()
