"""Copies of blocks for copy-on-write, all layers in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# 64-bit words per program.
BLOCK_WORDS = 1024


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
