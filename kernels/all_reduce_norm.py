"""The sum over the ranks of a tensor-parallel group, the residual addition and RMSNorm as one op.

For few tokens an all-reduce costs its launches and its waiting, not its bytes: each rank reads the parts of all
others itself ("one shot") and goes on with its sum, which costs one launch and no pass over memory more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import on_gpu
from .norm import add_rms_norm

# Programs of the kernel, which all have to run at once, as each waits for its like on the other ranks.
MAX_PROGRAMS = 32
# Signals that a rank has for each other: one before and one after a program reads.
NUM_SIGNALS = 2 * MAX_PROGRAMS


class Peers:
    """Memory that every rank of a group can read.

    Args:
        rank: this rank's place.
        parts: [max_tokens, E] of each rank, its part of a sum; one's own is overwritten by each op.
        signals: [NUM_SIGNALS * ranks] int32 of each rank, all 0.

    Attributes:
        max_tokens: that fit in a part.
        buffer_addresses, signal_addresses: [ranks] int64, of the above, on the device.
    """

    def __init__(self, rank: int, parts: Sequence[Tensor], signals: Sequence[Tensor]) -> None:
        assert all(len(signal) >= NUM_SIGNALS * len(parts) for signal in signals)
        self.rank = rank
        self.buffers, self.signals = tuple(parts), tuple(signals)
        self.max_tokens = len(parts[0])
        device = parts[rank].device
        self.buffer_addresses = torch.tensor([part.data_ptr() for part in parts], device=device)
        self.signal_addresses = torch.tensor([signal.data_ptr() for signal in signals], device=device)

    @property
    def size(self) -> int:
        return len(self.buffers)


@on_gpu("all_reduce_norm")
def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers) -> Tensor:
    """Adds the sum of the ranks' x to `residual` in place and returns the sum normalised, the same on each rank.

    The ranks are summed in their order, in float32. The twin does not wait for the others' parts.

    Args:
        x, residual: [T, E], at most peers.max_tokens tokens; every rank calls with as many.
        weight: [E].
    """
    num_tokens = len(x)
    peers.buffers[peers.rank][:num_tokens] = x
    total = torch.stack([part[:num_tokens] for part in peers.buffers]).sum(dim=0, dtype=torch.float32)
    return add_rms_norm(total.to(x.dtype), residual, weight, eps)
