"""Symmetric memory: GPU memory that all ranks of a group can read, for kernels.all_reduce_norm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...kernels.all_reduce_norm import NUM_SIGNALS, Peers
from ...kernels.dispatch import has_kernels
from ...proto.errors import ConfigError, first_line
from .communicator import Communicator
from .shared_memory import host_id
from .torch_distributed import TorchDistributed, dist

# Of the largest tensor. Larger ones are sums of prompts, for which NCCL is as fast.
MAX_BYTES = 4 << 20

_GROUP_NAME = "quire"


def open_symmetric_memory(
    comm: Communicator, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> Peers:
    """Open the memory for sums of [T, hidden_size] tensors; all ranks call it.

    Raises:
        ConfigError: the ranks do not use NCCL, are on several hosts, see only their own GPU, or their GPUs cannot
            read each other's memory.
    """
    if not isinstance(comm, TorchDistributed) or not has_kernels(torch.empty(0, device=device)):
        raise ConfigError("fused_all_reduce needs several ranks, each on a GPU of its own, and Triton")
    check_places(comm, device)
    max_tokens = max(1, MAX_BYTES // (hidden_size * dtype.itemsize))
    part_bytes = 2 * max_tokens * hidden_size * dtype.itemsize
    signals_start = math.ceil(part_bytes / 16) * 16  # in bytes, aligned for the int32 signals
    num_signals = NUM_SIGNALS * comm.size
    try:
        symmetric: Any = torch._C._distributed_c10d._SymmetricMemory
        with _registered_group(comm):
            memory = symmetric.empty_strided_p2p(
                (signals_start + 4 * num_signals,), (1,), torch.uint8, device, _GROUP_NAME
            )
            memory.zero_()
            handle = symmetric.rendezvous(memory, _GROUP_NAME)
        parts = [handle.get_buffer(rank, (2, max_tokens, hidden_size), dtype) for rank in range(comm.size)]
        signals = [
            handle.get_buffer(rank, (num_signals,), torch.int32, signals_start // 4)
            for rank in range(comm.size)
        ]
    except RuntimeError as error:
        reason = first_line(error)
        raise ConfigError(f"fused_all_reduce: the GPUs cannot read each other's memory: {reason}") from error
    comm.barrier()  # no rank may signal before the memory of all is zeroed
    return Peers(comm.rank, parts, signals, owner=(memory, handle))


def check_places(comm: Communicator, device: torch.device) -> None:
    """Raise ConfigError unless the ranks are on one host, each with a device index of its own."""
    own = torch.tensor([host_id(), device.index], device=device)
    # Of each rank, a number of its host and the index of its GPU among those that it sees.
    places = [(host, index) for host, index in comm.all_gather(own).tolist()]
    for rank, (host, index) in enumerate(places):
        if host != places[0][0]:
            raise ConfigError(
                f"fused_all_reduce: ranks 0 and {rank} are on different hosts or in different containers, must be "
                "in one; place the ranks together or turn fused_all_reduce off"
            )
        first = places.index((host, index))
        if first != rank:
            raise ConfigError(
                f"fused_all_reduce: the GPUs of ranks {first} and {rank} both have index {index}, because each rank "
                "sees only its own; set RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 for `ray start` on every node, "
                "or turn fused_all_reduce off"
            )


@contextmanager
def _registered_group(comm: TorchDistributed) -> Iterator[None]:
    """Register the ranks as a ProcessGroup under _GROUP_NAME, by which torch's rendezvous finds ranks and store."""
    registry: Any = torch._C._distributed_c10d
    # No collective runs on this group. The registry holds no reference to it.
    group = dist.ProcessGroup(dist.PrefixStore(_GROUP_NAME, comm.store), comm.rank, comm.size)
    group._set_group_name(_GROUP_NAME)
    registry._register_process_group(_GROUP_NAME, group)
    try:
        yield
    finally:
        registry._unregister_process_group(_GROUP_NAME)
