"""CacheEngine: the KV memory of one rank, in blocks that the scheduler alone assigns."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_cache import copy_blocks, swap_blocks
from ..proto.config import EngineConfig

DEFAULT_CPU_KV_BYTES = 512 << 20
# Blocks moved to learn how fast they move.
MEASURED_BLOCKS = 64


class CacheEngine:
    """The paged keys and values of this rank's KV heads, and the host memory that they are swapped to.

    Attributes:
        blocks: [L, num_blocks, 2, Hkv, block_size, D]; block 0 is scratch for padding rows.
        host_blocks: the same in host memory, [L, num_host_blocks + 1, ...], whose block 0 is never used; None
            without a host tier.
        layers: a layer each of `blocks`.
    """

    def __init__(
        self, config: EngineConfig, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        block = 2, config.num_kv_heads_per_rank, config.cache.block_size, config.model.head_dim
        num_layers, num_host_blocks = config.model.num_layers, config.cache.num_host_blocks
        self.blocks = _zeros((num_layers, num_blocks, *block), dtype, device)
        self.host_blocks: Tensor | None = None
        if num_host_blocks:
            self.host_blocks = _host_zeros((num_layers, num_host_blocks + 1, *block), dtype, device)
        self.layers = list(self.blocks.unbind())

    def copy(self, pairs: Tensor) -> None:
        """Copies blocks in every layer.

        Args:
            pairs: [n, 2] int64, source and destination.
        """
        copy_blocks(self.blocks, pairs[:, 0], pairs[:, 1])

    def swap_out(self, pairs: Tensor) -> None:
        """Copies device blocks to host memory, in every layer. The host waits for nothing: only swap_in reads it.

        Args:
            pairs: [n, 2] int64 on the host, device block and host block.
        """
        assert self.host_blocks is not None
        swap_blocks(self.blocks, self.host_blocks, pairs)

    def swap_in(self, pairs: Tensor) -> None:
        """Copies host blocks to the device, in every layer.

        Args:
            pairs: [n, 2] int64 on the host, host block and device block.
        """
        assert self.host_blocks is not None
        swap_blocks(self.host_blocks, self.blocks, pairs)

    def measure_swap_rate(self) -> float:
        """Blocks a second that move to host memory and back, each way; 0 without a host tier."""
        if self.host_blocks is None:
            return 0.0
        count = min(self.blocks.shape[1], self.host_blocks.shape[1], MEASURED_BLOCKS + 1) - 1
        if count < 1:
            return 0.0
        pairs = torch.arange(1, count + 1).repeat(2, 1).T
        self.swap_out(pairs)  # touches the pages for the first time
        self._synchronize()
        started = time.perf_counter()
        self.swap_out(pairs)
        self.swap_in(pairs)
        self._synchronize()
        return 2 * count / (time.perf_counter() - started)

    def _synchronize(self) -> None:
        if self.blocks.is_cuda:
            torch.cuda.synchronize(self.blocks.device)


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
