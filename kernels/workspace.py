"""Memory for intermediate results between the kernels of one op.

All ops of a device share it, so they must run one after the other: on one stream, or on streams that wait for each
other. It is not freed when a larger one takes its place, since captured CUDA graphs keep using its address.
"""

from __future__ import annotations

import torch
from torch import Tensor

# device |-> its memory in order of allocation, the largest last; sizes are powers of two, which bounds their sum
_workspaces: dict[torch.device, list[Tensor]] = {}


def float_workspace(num_floats: int, device: torch.device) -> Tensor:
    """Return at least `num_floats` uninitialized float32 numbers; the next caller overwrites them."""
    allocated = _workspaces.setdefault(device, [])
    if not allocated or len(allocated[-1]) < num_floats:
        num_floats = 1 << (num_floats - 1).bit_length()
        allocated.append(torch.empty(num_floats, dtype=torch.float32, device=device))
    return allocated[-1]


def workspaces(device: torch.device) -> tuple[Tensor, ...]:
    """Return all memory of a device, for owners of graphs that use its addresses."""
    return tuple(_workspaces.get(device, ()))


def free_workspaces(device: torch.device) -> None:
    """Free the memory of a device, except what the owners of graphs keep."""
    _workspaces.pop(device, None)
