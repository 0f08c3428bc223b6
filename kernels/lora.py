"""Low-rank adapters of linear layers (Hu et al., LoRA, 2021): tokens of many adapters in one op.

The tokens of a step that have an adapter are grouped by adapter, so each factor is read once per group, as in the
segmented matmul of Chen et al., Punica: Multi-Tenant LoRA Serving, 2023, and Sheng et al., S-LoRA, 2023. Tokens
without an adapter are in no group and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .dispatch import on_gpu
from .native import lora as native
from .native.ops import supports

# Most tokens of a group: the rows of a tile of tensor cores.
MAX_GROUP_LEN = 16


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The factors of one linear layer for L adapter slots.

    The layer's N outputs consist of P parts, for example queries, keys and values, each with factors of its own.
    Adapter l adds ``b[l, :rank, n] @ (a[l, p, :rank] @ x)`` to output n of part p, where ``rank`` is ranks[l, p].

    Attributes:
        a: [L, P, R, K].
        b: [L, R, N], with the adapter's scaling.
        ranks: [L, P] int32; 0 if the adapter leaves the part unchanged.
        starts: [P + 1] int32, the first output of each part, and N.
        bounds: the same on the host.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    starts: Tensor
    bounds: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the memory of all slots."""
        return self.a.nbytes + self.b.nbytes + self.ranks.nbytes

    def native(self) -> native.Factors:
        """Return the addresses for the C++ ops."""
        return native.native_factors(self.a, self.b, self.ranks, self.starts)


@dataclass(frozen=True, slots=True)
class LoraGroups:
    """The tokens of a step that have an adapter, in groups of up to MAX_GROUP_LEN tokens of one slot.

    Attributes:
        order: [n] int32, tokens by group.
        starts: [G + 1] int32, the first of each group in `order`, and the end of the last. A group may be empty.
        slots: [G] int32, the slot of each group.
        inputs: [n] int32, the row of the layer's inputs for each entry of `order`; None if it is that of the outputs.
    """

    order: Tensor
    starts: Tensor
    slots: Tensor
    inputs: Tensor | None = None

    @property
    def input_rows(self) -> Tensor:
        """Return the row of the layer's inputs for each entry of `order`."""
        return self.order if self.inputs is None else self.inputs

    def native(self) -> native.Groups:
        """Return the addresses for the C++ ops."""
        return native.native_groups(self.order, self.input_rows, self.starts, self.slots)


def make_factors(
    num_slots: int,
    max_rank: int,
    in_features: int,
    part_lens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> LoraFactors:
    """Return factors of empty slots. Zeros on a CPU take no memory until they are written."""
    bounds = (0, *np.cumsum(part_lens).tolist())
    num_parts = len(part_lens)
    return LoraFactors(
        torch.zeros(num_slots, num_parts, max_rank, in_features, dtype=dtype, device=device),
        torch.zeros(num_slots, max_rank, bounds[-1], dtype=dtype, device=device),
        torch.zeros(num_slots, num_parts, dtype=torch.int32, device=device),
        torch.tensor(bounds, dtype=torch.int32, device=device),
        bounds,
    )


def group_tokens(slots: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
    """Return order, starts and slots of LoraGroups.

    Args:
        slots: [T], the adapter slot of each token; negative for none.
    """
    tokens = np.flatnonzero(slots >= 0)
    order = tokens[np.argsort(slots[tokens], kind="stable")]
    of_order = slots[order]
    is_first = np.ones(order.size, np.bool_)
    is_first[1:] = of_order[1:] != of_order[:-1]
    run_starts = np.flatnonzero(is_first)
    place_in_run = np.arange(order.size) - np.repeat(run_starts, np.diff(np.append(run_starts, order.size)))
    starts = np.flatnonzero(place_in_run % MAX_GROUP_LEN == 0)
    return [
        order.astype(np.int32),
        np.append(starts, order.size).astype(np.int32),
        of_order[starts].astype(np.int32),
    ]


def max_groups(num_rows: int, num_slots: int) -> int:
    """Return the largest number of groups of rows that have adapters in up to `num_slots` slots."""
    # A slot of few rows has no more groups than rows, and each slot has at most one group that is not full.
    return min(num_rows, (num_rows + (MAX_GROUP_LEN - 1) * num_slots) // MAX_GROUP_LEN)


def group_rows(slots: Tensor, num_slots: int) -> LoraGroups:
    """As `group_tokens`, but on the device; the host reads nothing, so the number of groups is the largest possible.

    Args:
        slots: [T] integers, the adapter slot of each row; negative for none.
        num_slots: all slots are below.
    """
    keys, order = torch.where(slots < 0, num_slots, slots).sort(stable=True)
    device, num_rows = slots.device, len(slots)
    # Of each slot: its first row in `order`, and the number of its groups and of those up to its end.
    bounds = torch.searchsorted(keys, torch.arange(num_slots + 1, dtype=keys.dtype, device=device))
    num_groups = (bounds.diff() + MAX_GROUP_LEN - 1) // MAX_GROUP_LEN
    ends = num_groups.cumsum(0)
    index = torch.arange(max_groups(num_rows, num_slots), device=device)
    of_group = torch.searchsorted(ends, index, right=True)
    own = of_group.clamp(max=num_slots - 1)
    starts = bounds[own] + (index - ends[own] + num_groups[own]) * MAX_GROUP_LEN
    starts = torch.where(of_group < num_slots, starts, bounds[-1])
    return LoraGroups(order.int(), torch.cat((starts, bounds[-1:])).int(), own.int())


@on_gpu("lora")
def add_lora(y: Tensor, x: Tensor, factors: LoraFactors, groups: LoraGroups) -> None:
    """Add the adapters' outputs to those of a linear layer, in place.

    The low-rank intermediate is float32, and the sum is rounded once.

    Args:
        y: [T, N], outputs of the layer.
        x: [T, K], its inputs; as many rows as `groups` refers to.
    """
    if x.is_contiguous() and y.is_contiguous() and supports(x) and x.dtype == factors.a.dtype:
        native.add_lora(y, x, factors.native(), groups.native())
        return
    for (start, end), slot in zip(pairwise(groups.starts.tolist()), groups.slots.tolist(), strict=True):
        tokens = groups.order[start:end].long()
        inputs, outputs = x[groups.input_rows[start:end].long()].float(), y[tokens].float()
        for part, (first, last) in enumerate(pairwise(factors.bounds)):
            rank = int(factors.ranks[slot, part])
            low = inputs @ factors.a[slot, part, :rank].float().T
            outputs[:, first:last] += low @ factors.b[slot, :rank, first:last].float()
        y[tokens] = outputs.to(y.dtype)
