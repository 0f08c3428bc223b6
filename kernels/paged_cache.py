"""Writing to the paged KV cache of one layer, ``[N, 2, Hkv, B, D]``: N blocks of keys and values of B tokens."""

from __future__ import annotations

from torch import Tensor


def write_kv(kv: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores each token's key and value in its slot.

    Args:
        kv: [T, 2, Hkv, D], keys and values.
        kv_cache: [N, 2, Hkv, B, D].
        slot_mapping: [T] int64, ``block_id * B + offset``; below 0 for padding, which goes to block 0.
    """
    block_size = kv_cache.shape[3]
    slots = slot_mapping.clamp(min=0)
    kv_cache[slots // block_size, :, :, slots % block_size] = kv


def copy_blocks(kv_cache: Tensor, source_ids: Tensor, destination_ids: Tensor) -> None:
    """Copies whole blocks, all of them read before any is written.

    Args:
        kv_cache: [N, 2, Hkv, B, D].
        source_ids, destination_ids: [n] int64; no destination twice.
    """
    kv_cache.index_copy_(0, destination_ids, kv_cache.index_select(0, source_ids))
