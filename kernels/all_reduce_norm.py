"""All-reduce over a tensor-parallel group, residual addition and RMSNorm as one op.

With few tokens an all-reduce costs launches and waiting, not bytes. Each rank therefore reads the inputs of all
others itself ("one shot") and uses the sum at once, which takes one launch and no further pass over memory. With more
tokens and ranks, each rank sums a part of the tokens, and reads the other sums ("two shots"): twice the bytes of the
tokens instead of as many times as there are ranks, for one more wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .dispatch import on_gpu
from .norm import add_rms_norm

# Programs of the kernel. All must run at the same time, since each waits for the same program on the other ranks.
MAX_PROGRAMS = 32
# Signals per pair of ranks: each program signals once before and once after it reads, and between the two shots.
NUM_SIGNALS = 3 * MAX_PROGRAMS
# Bytes, those of the widest load.
BUFFER_ALIGNMENT = 16


class FusedSum(Protocol):
    """A sum over the ranks, residual addition and RMSNorm as one op; see all_reduce_add_rms_norm.

    Attributes:
        max_tokens: tokens of the largest sum.
    """

    max_tokens: int

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of the ranks' x to `residual` in place and return the normalized sum."""
        ...


class Peers:
    """Memory that every rank of a group can read: FusedSum by the kernel of quire.

    Args:
        rank: this rank.
        buffers: [2, max_tokens, E] of each rank: its input, and its sums of the first shot; each op overwrites the
            own buffer. Each is aligned to BUFFER_ALIGNMENT.
        signals: [NUM_SIGNALS * ranks] int32 of each rank, all 0.
        owner: kept as long as this object; the tensors may be views that do not keep their memory.

    Attributes:
        max_tokens: tokens of the largest sum; at most those that fit in a buffer.
        two_shots_from: tokens from which a sum takes two shots.
        buffer_addresses, signal_addresses: [ranks] int64, on the device.
    """

    def __init__(
        self, rank: int, buffers: Sequence[Tensor], signals: Sequence[Tensor], owner: object = None
    ) -> None:
        assert all(len(signal) >= NUM_SIGNALS * len(buffers) for signal in signals)
        assert all(buffer.data_ptr() % BUFFER_ALIGNMENT == 0 for buffer in buffers)
        self.rank = rank
        self._owner = owner
        self.buffers, self.signals = tuple(buffers), tuple(signals)
        self.max_tokens = buffers[0].shape[1]
        self.two_shots_from = self.max_tokens + 1
        device = buffers[rank].device
        self.buffer_addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device=device)
        self.signal_addresses = torch.tensor([signal.data_ptr() for signal in signals], device=device)

    @property
    def size(self) -> int:
        return len(self.buffers)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return all_reduce_add_rms_norm(x, residual, weight, eps, self)


@on_gpu("all_reduce_norm")
def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers) -> Tensor:
    """Add the sum of the ranks' x to `residual` in place and return the normalized sum, the same on each rank.

    The ranks are summed in order of rank, in float32. The reference does not wait for the other ranks' buffers.

    Args:
        x, residual: [T, E]; at most peers.max_tokens tokens, the same number on every rank.
        weight: [E].
    """
    num_tokens = len(x)
    peers.buffers[peers.rank][0, :num_tokens] = x
    total = torch.stack([buffer[0, :num_tokens] for buffer in peers.buffers]).sum(dim=0, dtype=torch.float32)
    return add_rms_norm(total.to(x.dtype), residual, weight, eps)
