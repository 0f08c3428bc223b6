"""Memory for intermediate results between the kernels of one op.

The memory is allocated once and never freed, since captured CUDA graphs keep using its address. All ops of a device
share it, so they must run one after the other: on one stream, or on streams that wait for each other.
"""

import torch
import triton
from torch import Tensor

# device, number of floats (a power of two) |-> the memory
_workspaces: dict[tuple[torch.device, int], Tensor] = {}


def float_workspace(num_floats: int, device: torch.device) -> Tensor:
    """Return at least `num_floats` uninitialized float32 numbers; the next caller overwrites them."""
    key = device, triton.next_power_of_2(num_floats)
    if key not in _workspaces:
        _workspaces[key] = torch.empty(key[1], dtype=torch.float32, device=device)
    return _workspaces[key]
