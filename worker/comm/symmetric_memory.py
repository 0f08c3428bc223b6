"""Symmetric memory: GPU memory that all ranks of a group can read, for kernels.all_reduce_norm."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...kernels.all_reduce_norm import NUM_SIGNALS, Peers
from ...kernels.dispatch import has_kernels
from ...proto.errors import ConfigError, first_line
from .communicator import Communicator
from .torch_distributed import TorchDistributed

# For larger tensors NCCL is as fast: it moves each byte once, not to every rank.
MAX_BYTES = 1 << 20

_GROUP_NAME = "quire"


def open_symmetric_memory(
    comm: Communicator, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> Peers:
    """Open the memory for sums of [T, hidden_size] tensors; all ranks call it.

    Raises:
        ConfigError: the ranks do not use NCCL, or their GPUs cannot read each other's memory.
    """
    if not isinstance(comm, TorchDistributed) or not has_kernels(torch.empty(0, device=device)):
        raise ConfigError("fused_all_reduce needs several ranks, each on a GPU of its own, and Triton")
    max_tokens = max(1, MAX_BYTES // (hidden_size * dtype.itemsize))
    part_bytes = max_tokens * hidden_size * dtype.itemsize
    signals_start = math.ceil(part_bytes / 16) * 16  # in bytes, aligned for the int32 signals
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
    comm.barrier()  # no rank may signal before the memory of all is zeroed
    return Peers(comm.rank, parts, signals)
