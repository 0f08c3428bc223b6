"""CacheEngine: the KV memory of one rank, in blocks that the scheduler alone assigns."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_cache import copy_blocks
from ..proto.config import EngineConfig

DEFAULT_CPU_KV_BYTES = 512 << 20
# Blocks moved to learn how fast they move.
MEASURED_BLOCKS = 64


class CacheEngine:
    """The paged keys and values of this rank's KV heads, and the host memory that they are swapped to.

    Attributes:
        layers: a layer each, [num_blocks, 2, Hkv, block_size, D]; block 0 is scratch for padding rows.
        host_layers: the same in host memory, [num_host_blocks + 1, ...], whose block 0 is never used.
    """

    def __init__(
        self, config: EngineConfig, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        block = 2, config.num_kv_heads_per_rank, config.cache.block_size, config.model.head_dim
        layers, num_host_blocks = range(config.model.num_layers), config.cache.num_host_blocks
        self.layers = [_zeros((num_blocks, *block), dtype, device) for _ in layers]
        self.host_layers: list[Tensor] = []
        if num_host_blocks:
            self.host_layers = [_host_zeros((num_host_blocks + 1, *block), dtype, device) for _ in layers]

    def copy(self, pairs: Tensor) -> None:
        """Copies blocks in every layer.

        Args:
            pairs: [n, 2] int64, source and destination.
        """
        for kv_cache in self.layers:
            copy_blocks(kv_cache, pairs[:, 0], pairs[:, 1])

    def swap_out(self, pairs: Tensor) -> None:
        """Copies device blocks to host memory, in every layer. The host waits for them.

        Args:
            pairs: [n, 2] int64 on the host, device block and host block.
        """
        for kv_cache, host in zip(self.layers, self.host_layers, strict=True):
            host[pairs[:, 1]] = kv_cache[pairs[:, 0].to(kv_cache.device)].to(host.device)

    def swap_in(self, pairs: Tensor) -> None:
        """Copies host blocks to the device, in every layer.

        Args:
            pairs: [n, 2] int64 on the host, host block and device block.
        """
        for kv_cache, host in zip(self.layers, self.host_layers, strict=True):
            blocks = host[pairs[:, 0]].to(kv_cache.device, non_blocking=True)
            kv_cache[pairs[:, 1].to(kv_cache.device)] = blocks

    def measure_swap_rate(self) -> float:
        """Blocks a second that move to host memory and back, each way; 0 without a host tier."""
        count = (
            min(len(self.layers[0]), len(self.host_layers[0]), MEASURED_BLOCKS + 1) - 1
            if self.host_layers
            else 0
        )
        if count < 1:
            return 0.0
        pairs = torch.arange(1, count + 1).repeat(2, 1).T
        self.swap_out(pairs)  # touches the pages for the first time
        started = time.perf_counter()
        self.swap_out(pairs)
        self.swap_in(pairs)
        if self.layers[0].device.type == "cuda":
            torch.cuda.synchronize(self.layers[0].device)
        return 2 * count / (time.perf_counter() - started)


def bytes_per_block(config: EngineConfig, dtype: torch.dtype) -> int:
    """KV bytes that a block takes on one rank, all layers together."""
    numbers = 2 * config.num_kv_heads_per_rank * config.cache.block_size * config.model.head_dim
    return config.model.num_layers * numbers * dtype.itemsize


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pinned where a device copies from it."""
    zeros = _zeros(shape, dtype, torch.device("cpu"))
    return zeros.pin_memory() if device.type == "cuda" else zeros


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are pages that the system hands out when they are first touched; torch's are written at once.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
