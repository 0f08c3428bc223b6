"""Writes to the paged KV cache: per layer ``[N, 2, Hkv, B, D]``, N blocks of keys and values of B tokens.

A latent cache (kernels.latent_attention) has one part per token instead of two: ``[N, 1, 1, B, D]``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .dispatch import has_kernels, on_gpu
from .native import ops as cpu
from .quantized_kv import LIMITS, MIN_MAGNITUDE, quantize

# Copies of runs in a layer from which a kernel reads and writes the host's memory instead: to launch a copy takes the
# host 5 us, 160 ms for 1,000 scattered blocks of 32 layers.
MIN_SCATTERED_COPIES = 64


def write_kv(
    kv: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
    fixed_scales: Tensor | None = None,
) -> None:
    """Store each token's key and value in its slot.

    Args:
        kv: [T, 2, Hkv, D], keys and values.
        kv_cache: [N, 2, Hkv, B, D].
        slot_mapping: [T] int64, ``block_id * B + offset``; negative for padding, which is written to block 0.
        kv_scales: [N, 2, Hkv, B] float32, if kv_cache is quantized (see kernels.quantized_kv).
        fixed_scales: [2] float32, of keys and of values; None: of each vector.
    """
    if cpu.supports(kv, kv.shape[3]) and kv_cache.is_contiguous() and fixed_scales is None:
        if kv_scales is not None:
            limit = LIMITS[kv_cache.dtype]
            cpu.write_quantized_kv(kv, kv_cache, kv_scales, slot_mapping, limit, MIN_MAGNITUDE)
            return
        if kv.dtype == kv_cache.dtype:
            cpu.write_kv(kv, kv_cache, slot_mapping)
            return
    block_size = kv_cache.shape[3]
    slots = slot_mapping.clamp(min=0)
    blocks, offsets = slots // block_size, slots % block_size
    if kv_scales is not None:
        fixed = None if fixed_scales is None else fixed_scales[:, None]
        kv, kv_scales[blocks, :, :, offsets] = quantize(kv, kv_cache.dtype, fixed)
    kv_cache[blocks, :, :, offsets] = kv


@on_gpu("paged_cache")
def copy_blocks(kv_caches: Tensor, source_ids: Tensor, destination_ids: Tensor) -> None:
    """Copy whole blocks in every layer.

    Args:
        kv_caches: [L, N, 2, Hkv, B, D].
        source_ids, destination_ids: [n] int64; destinations are distinct and none is a source.
    """
    if kv_caches.is_cpu:
        # torch copies a large block with OpenMP, whose threads then spin on the processors that the rest of the step
        # needs (see native/thread_pool.h): steps that copied a block took 12 to 25 ms instead of 7 to 8.
        stored = kv_caches.view(torch.uint8).numpy()
        for source_id, destination_id in zip(source_ids.tolist(), destination_ids.tolist(), strict=True):
            stored[:, destination_id] = stored[:, source_id]
        return
    kv_caches[:, destination_ids] = kv_caches[:, source_ids]


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks in every layer between a device and pinned host memory.

    Each run of adjacent blocks is one copy per layer, or one kernel copies all of many runs. The copies run in stream
    order; the host does not wait for them.

    Args:
        source, destination: [L, N, 2, Hkv, B, D] and [L, M, 2, Hkv, B, D]; at least one on the host.
        pairs: [n, 2] int64 on the host, source and destination ids; destinations are distinct.
    """
    runs, on_device = list(_runs(pairs.tolist())), source if source.is_cuda else destination
    if len(runs) * source.shape[0] >= MIN_SCATTERED_COPIES and has_kernels(on_device):
        copy_scattered_blocks(pairs.pin_memory().to(on_device.device, non_blocking=True), source, destination)
        return
    for source_id, destination_id, num_blocks in runs:
        for layer in range(source.shape[0]):
            destination[layer, destination_id : destination_id + num_blocks].copy_(
                source[layer, source_id : source_id + num_blocks], non_blocking=True
            )


@on_gpu("paged_cache")
def copy_scattered_blocks(pairs: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy whole blocks in every layer, as swap_blocks does.

    Args:
        pairs: as for swap_blocks, but on the device.
    """
    places = pairs.to(source.device)[:, 0], pairs.to(destination.device)[:, 1]
    destination[:, places[1]] = source[:, places[0]].to(destination.device)


def _runs(pairs: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (first source, first destination, length) of runs in which both ids count up together."""
    start = 0
    pairs = sorted(pairs)
    for end in range(1, len(pairs) + 1):
        source_id, destination_id = pairs[end - 1]
        if end == len(pairs) or pairs[end] != [source_id + 1, destination_id + 1]:
            yield pairs[start][0], pairs[start][1], end - start
            start = end
