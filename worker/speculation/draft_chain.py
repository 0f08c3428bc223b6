"""sample_drafts: samples drafted tokens one after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray
from ..memory.host_to_device import to_device
from ..sampling.sampler import Sampler
from ..step.device_rows import DeviceRows

# Rows, positions of their newest drafted tokens, and hidden states before these |-> hidden states at them.
Advance = Callable[[RowArray, IntArray, Tensor], Tensor]


def sample_drafts(
    rows: DeviceRows,
    sampler: Sampler,
    drafting: RowArray,
    limits: IntArray,
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
    advance: Advance,
) -> None:
    """Sample up to `limits` tokens of each row, and write them behind the known ones.

    A token is sampled with the parameters and the random numbers of its row and position, as the target model does.

    Args:
        drafting, limits: [n].
        hidden: [n, E], of the newest known token of each row.
    """
    for place in range(int(limits.max(initial=0))):
        goes_on = limits > place
        if place:
            positions = rows.lens[drafting[goes_on]] + place - 1
            own = hidden if goes_on.all() else hidden[_index_of(goes_on, hidden)]
            hidden = advance(drafting[goes_on], positions, own)
        elif not goes_on.all():
            hidden = hidden[_index_of(goes_on, hidden)]
        drafting, limits = drafting[goes_on], limits[goes_on]
        positions = rows.lens[drafting] + place
        token_ids = sampler.sample_tokens(logits(hidden), None, rows.sampling, drafting, positions)
        rows.write(drafting, positions, token_ids)


def _index_of(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], like: Tensor) -> Tensor:
    return to_device(np.flatnonzero(mask), like.device, torch.int64)
