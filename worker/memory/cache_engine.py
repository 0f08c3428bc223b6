"""CacheEngine: the KV cache of one rank; the scheduler alone assigns its blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ...kernels.flash_attention import ChunkAttention
from ...kernels.paged_cache import copy_blocks, swap_blocks
from ...proto.cache_groups import CacheLayout, make_layout
from ...proto.config import EngineConfig, ModelConfig
from ..attention import LayerCache
from .pinned_memory import pinned_zeros

DEFAULT_CPU_KV_BYTES = 512 << 20
# Blocks moved by a measurement of the swap rate.
MEASURED_BLOCKS = 64
# CacheConfig.kv_dtype |-> element type of the cache; "auto" is the model's dtype.
QUANTIZED_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


class CacheEngine:
    """The paged keys and values of this rank's KV heads, or latents, and the host memory for swapped blocks.

    On a GPU, swaps run on a stream of their own, after everything launched before them. Call `wait_for_swaps` before
    launching anything that uses the cache. The host waits for neither.

    Args:
        num_blocks: on the device.
        num_host_blocks: in host memory; 0 for no host tier.
        dtype: the model's dtype.
        attend_chunks: as in LayerCache.
        touches_pages: on a CPU, write the device's part now.

    Attributes:
        layers: the cache of each layer; block 0 is scratch for padding rows.
        draft_layers: of the draft model, for the same blocks.
        num_blocks: on the device.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        attend_chunks: ChunkAttention | None = None,
        *,
        touches_pages: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        # The parts of a block: keys and values (or latents), and their scales if they are quantized. Each tensor is
        # [L, num_blocks, 2, Hkv, B, ...]; in host memory [L, num_host_blocks + 1, ...], block 0 unused. L is the
        # number of layers in a block, of each cache group in turn.
        self._parts, self._host_parts = list[Tensor](), list[Tensor]()
        layers = []
        for model, layout in _models(config):
            caches = {}
            for heads, groups in _layers_by_shape(config, model, layout).items():
                own = []
                for block, part_dtype in _block_parts(config, heads, dtype):
                    shape = _num_places(groups), num_blocks, *block
                    own.append(_zeros(shape, part_dtype, device, touches_pages=touches_pages))
                    if num_host_blocks:
                        shape = _num_places(groups), num_host_blocks + 1, *block
                        self._host_parts.append(_host_zeros(shape, part_dtype, device))
                self._parts += own
                for group, indices in enumerate(groups):
                    for index, (blocks, *scales) in zip(indices, zip(*own, strict=True), strict=False):
                        caches[index] = LayerCache(
                            blocks, scales[0] if scales else None, attend_chunks, group
                        )
            layers.append([caches[index] for index in sorted(caches)])
        self.layers, *drafts = layers
        self.draft_layers = drafts[0] if drafts else []
        self._swap_stream: torch.cuda.Stream | None = None
        if self._host_parts and device.type == "cuda":
            self._swap_stream = torch.cuda.Stream(device)

    def copy(self, pairs: Tensor) -> None:
        """Copy blocks in every layer.

        Args:
            pairs: [n, 2] int64, source and destination.
        """
        self.wait_for_swaps()
        for part in self._parts:
            copy_blocks(part, pairs[:, 0], pairs[:, 1])

    def swap_out(self, pairs: Tensor) -> None:
        """Copy device blocks to host memory, in every layer.

        Args:
            pairs: [n, 2] int64 on the host, device block and host block.
        """
        with self._on_swap_stream():
            for part, host_part in zip(self._parts, self._host_parts, strict=True):
                swap_blocks(part, host_part, pairs)

    def swap_in(self, pairs: Tensor) -> None:
        """Copy host blocks to the device, in every layer.

        Args:
            pairs: [n, 2] int64 on the host, host block and device block.
        """
        with self._on_swap_stream():
            for part, host_part in zip(self._parts, self._host_parts, strict=True):
                swap_blocks(host_part, part, pairs)

    def wait_for_swaps(self) -> None:
        """Make later launches on the current stream wait for the swaps, which read blocks that a step may write."""
        if self._swap_stream is not None:
            torch.cuda.current_stream(self._swap_stream.device).wait_stream(self._swap_stream)

    def measure_swap_rate(self) -> float:
        """Return the measured swap rate to host memory and back, in blocks/s each way; 0 without host memory."""
        if not self._host_parts:
            return 0.0
        count = min(self._parts[0].shape[1], self._host_parts[0].shape[1], MEASURED_BLOCKS + 1) - 1
        if count < 1:
            return 0.0
        pairs = torch.arange(1, count + 1).repeat(2, 1).T
        self.swap_out(pairs)  # touches the pages of the host memory for the first time
        self._synchronize()
        started = time.perf_counter()
        self.swap_out(pairs)
        self.swap_in(pairs)
        self._synchronize()
        return 2 * count / (time.perf_counter() - started)

    @contextmanager
    def _on_swap_stream(self) -> Iterator[None]:
        """Run the body on the swap stream, after everything launched so far; on a CPU run it directly."""
        if self._swap_stream is None:
            yield
            return
        self._swap_stream.wait_stream(torch.cuda.current_stream(self._swap_stream.device))
        with torch.cuda.stream(self._swap_stream):
            yield

    def _synchronize(self) -> None:
        if self._swap_stream is not None:
            self._swap_stream.synchronize()


def bytes_per_block(config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the KV bytes of a block on one rank, in all its layers, for a model of `dtype`."""
    return sum(
        _num_places(groups) * math.prod(shape) * part.itemsize
        for model, layout in _models(config)
        for heads, groups in _layers_by_shape(config, model, layout).items()
        for shape, part in _block_parts(config, heads, dtype)
    )


def _models(config: EngineConfig) -> list[tuple[ModelConfig, CacheLayout]]:
    """Return the models whose keys and values a block has: the target, and a draft model if there is one.

    The draft model's layers are in the blocks of the first cache group.
    """
    models, draft = [(config.model, config.cache_layout)], config.speculative_draft
    if draft is not None:
        models.append((draft, make_layout(draft.num_kv_layers, (), draft.max_model_len, 0)))
    return models


def _layers_by_shape(
    config: EngineConfig, model: ModelConfig, layout: CacheLayout
) -> dict[tuple[int, int, int], list[list[int]]]:
    """Return how a token is cached (see ModelConfig.kv_shape) |-> for each cache group, the layers that do so."""
    layers: dict[tuple[int, int, int], list[list[int]]] = {}
    shapes = model.kv_shapes(config.parallel.tensor_parallel_size)
    for group in layout.groups:
        for heads in dict.fromkeys(shapes):
            alike = [index for index in group.layers if shapes[index] == heads]
            layers.setdefault(heads, []).append(alike)
    return layers


def _num_places(groups: list[list[int]]) -> int:
    """Return the number of layers of one shape that a block has room for."""
    return max(map(len, groups))


def _block_parts(
    config: EngineConfig, heads: tuple[int, int, int], dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each part of a block in one layer.

    Args:
        heads: as returned by ModelConfig.kv_shape.
    """
    num_parts, num_heads, dim = heads
    slots = num_parts, num_heads, config.cache.block_size
    quantized = QUANTIZED_DTYPES.get(config.cache.kv_dtype)
    if quantized is None:
        return [((*slots, dim), dtype)]
    return [((*slots, dim), quantized), (slots, torch.float32)]


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory, pinned if the device is a GPU."""
    return _zeros(shape, dtype, device) if device.type == "cpu" else pinned_zeros(shape, dtype)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, touches_pages: bool = True
) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy allocates on huge pages if the system has some. The pages are touched here, not by the first steps: the
    # first touch took a ninth of a prompt's time, and missing memory is better found now.
    num_bytes = math.prod(shape) * dtype.itemsize
    if not touches_pages:
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
    return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).zero_().view(dtype).view(shape)
