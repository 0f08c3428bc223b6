"""CacheEngine: the KV memory of one rank, in blocks that the scheduler alone assigns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_cache import copy_blocks
from ..proto.config import EngineConfig

DEFAULT_CPU_KV_BYTES = 512 << 20


class CacheEngine:
    """The paged keys and values of this rank's KV heads.

    Attributes:
        layers: a layer each, [num_blocks, 2, Hkv, block_size, D]; block 0 is scratch for padding rows.
    """

    def __init__(
        self, config: EngineConfig, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = num_blocks, 2, config.num_kv_heads_per_rank, config.cache.block_size, config.model.head_dim
        self.layers = [_zeros(shape, dtype, device) for _ in range(config.model.num_layers)]

    def copy(self, pairs: Tensor) -> None:
        """Copies blocks in every layer.

        Args:
            pairs: [n, 2] int64, source and destination.
        """
        for kv_cache in self.layers:
            copy_blocks(kv_cache, pairs[:, 0], pairs[:, 1])


def bytes_per_block(config: EngineConfig, dtype: torch.dtype) -> int:
    """KV bytes that a block takes on one rank, all layers together."""
    numbers = 2 * config.num_kv_heads_per_rank * config.cache.block_size * config.model.head_dim
    return config.model.num_layers * numbers * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are pages that the system hands out when they are first touched; torch's are written at once.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
