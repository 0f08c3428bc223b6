"""StepAdapters: the tokens of one step that have adapters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from ...kernels.lora import LoraGroups, group_tokens
from ...proto.block_tables import IntArray
from ...proto.lora import NO_SLOT
from ..memory.host_to_device import to_device_together


class LayerTokens(Enum):
    """The tokens that a layer computes: all of the step, those that this rank attends for, or sends to experts."""

    ALL = "all"
    OWN = "own"
    SENT = "sent"


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step of T tokens, N of which are sampled from. All is None if no token has an adapter.

    Attributes:
        groups: the tokens with an adapter.
        token_slots: [T] int32, the slot of each token's adapter; NO_SLOT for none.
        sampled: those of the N rows of the head's input that have an adapter; None if none has.
        own: those of the tokens that this rank attends for that have an adapter; None if none has.
        sent: those of the tokens that this rank sends to their experts; None if none has.
        sent_slots: as `token_slots`, of the tokens that this rank sends; None if tokens do not travel.
    """

    groups: LoraGroups | None = None
    token_slots: Tensor | None = None
    sampled: LoraGroups | None = None
    own: LoraGroups | None = None
    sent: LoraGroups | None = None
    sent_slots: Tensor | None = None

    def groups_of(self, tokens: LayerTokens) -> LoraGroups | None:
        """Return the tokens with an adapter, of those that a layer computes."""
        parts = {LayerTokens.ALL: self.groups, LayerTokens.OWN: self.own, LayerTokens.SENT: self.sent}
        return parts[tokens]

    @property
    def is_empty(self) -> bool:
        """Return whether no token has an adapter."""
        return self.groups is None


NO_ADAPTERS = StepAdapters()


def make_step_adapters(
    slots: IntArray,
    sampled_slots: IntArray | None,
    device: torch.device,
    own_slots: IntArray | None = None,
    sent_slots: IntArray | None = None,
) -> StepAdapters:
    """Return the adapters of a step; NO_ADAPTERS if no token has one.

    Args:
        slots: [T], as `token_slots`.
        sampled_slots: [N], of the tokens that are sampled from; None if these are all T tokens.
        own_slots: of the tokens that this rank attends for; None if these are all T tokens.
        sent_slots: of the tokens that this rank sends to their experts; None if none travel.
    """
    if not _any(slots):
        return NO_ADAPTERS
    parts = [each for each in (sampled_slots, own_slots, sent_slots) if each is not None and _any(each)]
    arrays = [*group_tokens(slots), slots, *(array for part in parts for array in group_tokens(part))]
    if sent_slots is not None:
        arrays.append(sent_slots)
    order, starts, own, token_slots, *others = to_device_together(arrays, device)
    groups, of_sent = LoraGroups(order, starts, own), None if sent_slots is None else others.pop()

    def of_part(part: IntArray | None) -> LoraGroups | None:
        if part is None:
            return groups
        if not _any(part):
            return None
        order, starts, own = (others.pop(0) for _ in range(3))
        return LoraGroups(order, starts, own)

    return StepAdapters(
        groups, token_slots, of_part(sampled_slots), of_part(own_slots), of_part(sent_slots), of_sent
    )


def make_groups(slots: IntArray, device: torch.device) -> LoraGroups | None:
    """Return the rows with an adapter. Returns None if no row has one.

    Args:
        slots: the slot of each row's adapter; NO_SLOT for none.
    """
    return LoraGroups(*to_device_together(group_tokens(slots), device)) if _any(slots) else None


def _any(slots: IntArray) -> bool:
    return bool(np.count_nonzero(slots != NO_SLOT))
