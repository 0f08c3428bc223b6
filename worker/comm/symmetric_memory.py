"""GPU memory that all ranks of a group can read: torch's symmetric memory, for kernels.all_reduce_norm."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...kernels.all_reduce_norm import NUM_SIGNALS, Peers
from ...kernels.dispatch import has_kernels
from ...proto.errors import ConfigError, first_line
from .communicator import Communicator, TorchDistributed

# Above it NCCL, which moves each byte once and not to every rank, is as fast.
MAX_BYTES = 1 << 20

_GROUP_NAME = "quire"


def share_memory(comm: Communicator, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Peers:
    """Opens the memory of sums of [T, hidden_size]; every rank calls it.

    Raises:
        ConfigError: the ranks do not meet over NCCL, or their GPUs cannot read each other's memory.
    """
    if not isinstance(comm, TorchDistributed) or not has_kernels(torch.empty(0, device=device)):
        raise ConfigError("fused_all_reduce needs several ranks, each on a GPU of its own, and Triton")
    max_tokens = max(1, MAX_BYTES // (hidden_size * dtype.itemsize))
    part_bytes = max_tokens * hidden_size * dtype.itemsize
    signals_start = math.ceil(part_bytes / 16) * 16  # bytes, and a whole number of signals
    num_signals = NUM_SIGNALS * comm.size
    try:
        symmetric: Any = torch._C._distributed_c10d._SymmetricMemory
        symmetric.set_group_info(_GROUP_NAME, comm.rank, comm.size, comm.store)
        memory = symmetric.empty_strided_p2p(
            (signals_start + 4 * num_signals,), (1,), torch.uint8, device, _GROUP_NAME
        )
        memory.zero_()
        handle = symmetric.rendezvous(memory)
        parts = [handle.get_buffer(rank, (max_tokens, hidden_size), dtype) for rank in range(comm.size)]
        signals = [
            handle.get_buffer(rank, (num_signals,), torch.int32, signals_start // 4)
            for rank in range(comm.size)
        ]
    except RuntimeError as error:
        reason = first_line(error)
        raise ConfigError(f"fused_all_reduce: the GPUs cannot read each other's memory: {reason}") from error
    comm.barrier()  # nobody signals before all are zeroed
    return Peers(comm.rank, parts, signals)
