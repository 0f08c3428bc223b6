"""Copies of blocks for copy-on-write, and between the device and the host, all layers in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# 64-bit words per program.
BLOCK_WORDS = 1024
# Programs that copy between device and host. These keep a quarter of a megabyte under way, more than the bus needs,
# and leave most multiprocessors to the step.
NUM_SWAP_PROGRAMS = 32


# The ids of one copy are columns of one matrix, of which the second is not aligned; those of several are copied.
@triton.jit(do_not_specialize_on_alignment=["source_ids_ptr", "destination_ids_ptr"])
def _copy_blocks(
    caches_ptr,  # [L, N, W] words
    source_ids_ptr,  # [n]
    destination_ids_ptr,  # [n]
    block_words,
    stride_layer,
    BLOCK_W: tl.constexpr,
):
    # grid: (tiles of W, n, L)
    offs_w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = offs_w < block_words
    source = tl.load(source_ids_ptr + tl.program_id(1)).to(tl.int64)
    destination = tl.load(destination_ids_ptr + tl.program_id(1)).to(tl.int64)
    layer_ptr = caches_ptr + tl.program_id(2).to(tl.int64) * stride_layer
    words = tl.load(layer_ptr + source * block_words + offs_w, mask=mask)
    tl.store(layer_ptr + destination * block_words + offs_w, words, mask=mask)


def copy_blocks(kv_caches: Tensor, source_ids: Tensor, destination_ids: Tensor) -> None:
    """See kernels.paged_cache."""
    num_layers, num_blocks = kv_caches.shape[:2]
    assert kv_caches.is_contiguous()
    words = kv_caches.view(num_layers, num_blocks, -1).view(torch.int64)
    block_words = words.shape[2]
    grid = triton.cdiv(block_words, BLOCK_WORDS), source_ids.shape[0], num_layers
    _copy_blocks[grid](
        words, source_ids.contiguous(), destination_ids.contiguous(), block_words, words.stride(0),
        BLOCK_W=BLOCK_WORDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "num_copies", "stride_source", "stride_destination"])
def _copy_scattered_blocks(
    pairs_ptr,  # [n, 2]
    source_ptr,  # [L, N, W] words
    destination_ptr,  # [L, M, W]
    num_pairs,
    num_copies,
    block_words,
    stride_source,
    stride_destination,
    BLOCK_W: tl.constexpr,
):
    # grid: (NUM_SWAP_PROGRAMS,)
    for copy in range(tl.program_id(0), num_copies, tl.num_programs(0)):
        layer = (copy // num_pairs).to(tl.int64)
        pair_ptr = pairs_ptr + copy % num_pairs * 2
        from_ptr = source_ptr + layer * stride_source + tl.load(pair_ptr).to(tl.int64) * block_words
        to_ptr = (
            destination_ptr + layer * stride_destination + tl.load(pair_ptr + 1).to(tl.int64) * block_words
        )
        for start in range(0, block_words, BLOCK_W):
            offs_w = start + tl.arange(0, BLOCK_W)
            mask = offs_w < block_words
            tl.store(to_ptr + offs_w, tl.load(from_ptr + offs_w, mask=mask), mask=mask)


def copy_scattered_blocks(pairs: Tensor, source: Tensor, destination: Tensor) -> None:
    """See kernels.paged_cache. Pinned host memory has the same address on the device."""
    num_layers = source.shape[0]
    assert source.is_contiguous()
    assert destination.is_contiguous()
    assert pairs.is_contiguous()
    words, targets = (each.view(*each.shape[:2], -1).view(torch.int64) for each in (source, destination))
    _copy_scattered_blocks[(NUM_SWAP_PROGRAMS,)](
        pairs, words, targets, len(pairs), len(pairs) * num_layers, words.shape[2], words.stride(0),
        targets.stride(0), BLOCK_W=BLOCK_WORDS, num_warps=8,
    )  # fmt: skip
