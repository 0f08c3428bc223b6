"""Memory for what one op's kernels hand to each other.

It is allocated once and never freed: a captured CUDA graph goes on using its address. Ops of one device must
therefore run one after the other, on one stream or on streams that wait for each other, as a step's do.
"""

import torch
import triton
from torch import Tensor

# device, number of floats (a power of two) |-> the memory
_workspaces: dict[tuple[torch.device, int], Tensor] = {}


def float_workspace(num_floats: int, device: torch.device) -> Tensor:
    """At least so many float32 numbers of any value; the next caller overwrites them."""
    key = device, triton.next_power_of_2(num_floats)
    if key not in _workspaces:
        _workspaces[key] = torch.empty(key[1], dtype=torch.float32, device=device)
    return _workspaces[key]
