"""CacheEngine: the KV memory of one rank, in blocks that the scheduler alone assigns."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_cache import copy_blocks, swap_blocks
from ...proto.config import EngineConfig
from ..attention import LayerCache

DEFAULT_CPU_KV_BYTES = 512 << 20
# Blocks moved to learn how fast they move.
MEASURED_BLOCKS = 64
# CacheConfig.kv_dtype |-> what the cache holds; "auto" is what the model computes in.
QUANTIZED_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


class CacheEngine:
    """The paged keys and values of this rank's KV heads, and the host memory that they are swapped to.

    On a GPU, swaps run on a stream of their own, which waits for what has been launched before them; whoever uses
    the cache afterwards waits for them by `join_swaps`. The host waits for neither.

    Args:
        dtype: what the model computes in.

    Attributes:
        layers: the cache, a layer each; block 0 is scratch for padding rows.
    """

    def __init__(
        self, config: EngineConfig, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_layers, num_host_blocks = config.model.num_layers, config.cache.num_host_blocks
        # What a block consists of: keys and values, and their scales where they are quantised. Each tensor is
        # [L, num_blocks, 2, Hkv, block_size, ...]; in host memory [L, num_host_blocks + 1, ...], block 0 unused.
        self._parts, self._host_parts = [], []
        for block, part_dtype in _block_parts(config, dtype):
            self._parts.append(_zeros((num_layers, num_blocks, *block), part_dtype, device))
            if num_host_blocks:
                shape = num_layers, num_host_blocks + 1, *block
                self._host_parts.append(_host_zeros(shape, part_dtype, device))
        self.layers = [LayerCache(*tensors) for tensors in zip(*self._parts, strict=True)]
        self._swaps: torch.cuda.Stream | None = None
        if self._host_parts and device.type == "cuda":
            self._swaps = torch.cuda.Stream(device)

    def copy(self, pairs: Tensor) -> None:
        """Copies blocks in every layer.

        Args:
            pairs: [n, 2] int64, source and destination.
        """
        self.join_swaps()
        for part in self._parts:
            copy_blocks(part, pairs[:, 0], pairs[:, 1])

    def swap_out(self, pairs: Tensor) -> None:
        """Copies device blocks to host memory, in every layer.

        Args:
            pairs: [n, 2] int64 on the host, device block and host block.
        """
        with self._swapping():
            for part, host_part in zip(self._parts, self._host_parts, strict=True):
                swap_blocks(part, host_part, pairs)

    def swap_in(self, pairs: Tensor) -> None:
        """Copies host blocks to the device, in every layer.

        Args:
            pairs: [n, 2] int64 on the host, host block and device block.
        """
        with self._swapping():
            for part, host_part in zip(self._parts, self._host_parts, strict=True):
                swap_blocks(host_part, part, pairs)

    def join_swaps(self) -> None:
        """Makes what is launched from now on wait for the swaps: they read blocks that a step may write."""
        if self._swaps is not None:
            torch.cuda.current_stream(self._swaps.device).wait_stream(self._swaps)

    def measure_swap_rate(self) -> float:
        """Blocks a second that move to host memory and back, each way; 0 without a host tier."""
        if not self._host_parts:
            return 0.0
        count = min(self._parts[0].shape[1], self._host_parts[0].shape[1], MEASURED_BLOCKS + 1) - 1
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

    @contextmanager
    def _swapping(self) -> Iterator[None]:
        """On the swaps' stream, after everything launched so far; on a CPU copies are made at once."""
        if self._swaps is None:
            yield
            return
        self._swaps.wait_stream(torch.cuda.current_stream(self._swaps.device))
        with torch.cuda.stream(self._swaps):
            yield

    def _synchronize(self) -> None:
        if self._swaps is not None:
            self._swaps.synchronize()


def bytes_per_block(config: EngineConfig, dtype: torch.dtype) -> int:
    """KV bytes that a block takes on one rank, all layers together, where the model computes in `dtype`."""
    parts = _block_parts(config, dtype)
    return config.model.num_layers * sum(math.prod(shape) * part.itemsize for shape, part in parts)


def _block_parts(config: EngineConfig, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of what a block of one layer consists of."""
    slots = 2, config.num_kv_heads_per_rank, config.cache.block_size
    quantized = QUANTIZED_DTYPES.get(config.cache.kv_dtype)
    if quantized is None:
        return [((*slots, config.model.head_dim), dtype)]
    return [((*slots, config.model.head_dim), quantized), (slots, torch.float32)]


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pinned where a device copies from it."""
    zeros = _zeros(shape, dtype, torch.device("cpu"))
    return zeros.pin_memory() if device.type == "cuda" else zeros


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's lie on huge pages where the system has some. They are written here and not by steps: the first touch
    # took a ninth of the time of a prompt, and memory that is not there is better missed now.
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).zero_().view(dtype).view(shape)
