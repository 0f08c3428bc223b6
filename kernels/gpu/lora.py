"""Low-rank adapters: two launches per layer for the tokens of all adapters, x A and then y += (x A) B.

A program computes a tile of one group of tokens. The intermediate result goes through memory in float32, [n, P, R]:
programs of the second launch share it between the tiles of outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lora import MAX_GROUP_LEN, LoraFactors, LoraGroups
from .tile_configs import INTERPRETED

# Least sum length of tl.dot.
MIN_RANK = 16
# Inputs per iteration and outputs per program. Chosen by the compiler's report, not yet by measurement.
BLOCK_INPUTS = 128
BLOCK_OUTPUTS = 128
# Bytes of a tile of A, and numbers of a tile of B, which is converted to float32; larger ones spill on 8.0.
MAX_A_BYTES = 16384
MAX_B_LEN = 4096
# Most rows of B per iteration.
BLOCK_RANKS = 64


@triton.jit
def _shrink(
    x_ptr,  # [T, K]
    a_ptr,  # [L, P, R, K]
    ranks_ptr,  # [L, P]
    inputs_ptr,  # [n], rows of x
    starts_ptr,  # [G + 1]
    slots_ptr,  # [G]
    low_ptr,  # [n, P, R] float32
    in_features,
    MAX_RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # grid: (G, P)
    group, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    own = tl.load(slots_ptr + group) * num_parts + part
    rank = tl.load(ranks_ptr + own)
    first, end = tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)
    if (rank == 0) | (first == end):
        return
    offs_t = first + tl.arange(0, BLOCK_T)
    mask_t = offs_t < end
    tokens = tl.load(inputs_ptr + offs_t, mask=mask_t, other=0)
    offs_r = tl.arange(0, BLOCK_R)
    mask_r = offs_r < rank
    token_ptrs = x_ptr + tokens[:, None].to(tl.int64) * in_features
    row_ptrs = a_ptr + (own.to(tl.int64) * MAX_RANK + offs_r[None, :]) * in_features
    sums = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < in_features
        x = tl.load(token_ptrs + offs_k[None, :], mask=mask_t[:, None] & mask_k[None, :], other=0.0)
        a = tl.load(row_ptrs + offs_k[:, None], mask=mask_k[:, None] & mask_r[None, :], other=0.0)
        if UPCAST:
            x, a = x.to(tl.float32), a.to(tl.float32)
        sums = tl.dot(x, a, sums, input_precision="tf32x3")
    low_ptrs = low_ptr + (offs_t[:, None] * num_parts + part) * MAX_RANK + offs_r[None, :]
    tl.store(low_ptrs, sums, mask=mask_t[:, None] & mask_r[None, :])


@triton.jit
def _expand(
    y_ptr,  # [T, N]
    low_ptr,  # [n, P, R] float32
    b_ptr,  # [L, R, N]
    ranks_ptr,  # [L, P]
    part_starts_ptr,  # [P + 1]
    order_ptr,  # [n]
    starts_ptr,  # [G + 1]
    slots_ptr,  # [G]
    out_features,
    MAX_RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # grid: (G, P, tiles of the longest part)
    group, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slots_ptr + group)
    rank = tl.load(ranks_ptr + slot * num_parts + part)
    offs_n = tl.load(part_starts_ptr + part) + tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < tl.load(part_starts_ptr + part + 1)
    first, end = tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)
    if (rank == 0) | (first == end):
        return
    offs_t = first + tl.arange(0, BLOCK_T)
    mask_t = offs_t < end
    tokens = tl.load(order_ptr + offs_t, mask=mask_t, other=0)
    mask = mask_t[:, None] & mask_n[None, :]
    y_ptrs = y_ptr + tokens[:, None].to(tl.int64) * out_features + offs_n[None, :]
    sums = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    low_ptrs = low_ptr + (offs_t[:, None] * num_parts + part) * MAX_RANK
    b_ptrs = b_ptr + slot.to(tl.int64) * MAX_RANK * out_features + offs_n[None, :]
    for start in range(0, rank, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        mask_r = offs_r < rank
        low = tl.load(low_ptrs + offs_r[None, :], mask=mask_t[:, None] & mask_r[None, :], other=0.0)
        b = tl.load(
            b_ptrs + offs_r[:, None] * out_features, mask=mask_r[:, None] & mask_n[None, :], other=0.0
        )
        sums = tl.dot(low, b.to(tl.float32), sums, input_precision="tf32x3")
    tl.store(y_ptrs, sums.to(y_ptr.dtype.element_ty), mask=mask)


def add_lora(y: Tensor, x: Tensor, factors: LoraFactors, groups: LoraGroups) -> None:
    """See kernels.lora."""
    _, num_parts, max_rank, in_features = factors.a.shape
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert x.shape[1] == in_features
    assert y.shape[1] == factors.b.shape[2]
    assert x.dtype == y.dtype == factors.a.dtype == factors.b.dtype
    low = torch.empty(len(groups.order), num_parts, max_rank, dtype=torch.float32, device=x.device)
    block_rank = max(MIN_RANK, triton.next_power_of_2(max_rank))
    block_inputs = max(16, min(BLOCK_INPUTS, MAX_A_BYTES // (block_rank * x.element_size())))
    _shrink[len(groups.slots), num_parts](
        x, factors.a, factors.ranks, groups.input_rows, groups.starts, groups.slots, low, in_features,
        MAX_RANK=max_rank, BLOCK_T=MAX_GROUP_LEN, BLOCK_R=block_rank, BLOCK_K=block_inputs,
        UPCAST=INTERPRETED, num_warps=4, num_stages=3,
    )  # fmt: skip
    longest = max(end - start for start, end in zip(factors.bounds, factors.bounds[1:], strict=False))
    block_rank = min(block_rank, BLOCK_RANKS)
    block_outputs = min(BLOCK_OUTPUTS, MAX_B_LEN // block_rank)
    _expand[len(groups.slots), num_parts, triton.cdiv(longest, block_outputs)](
        y, low, factors.b, factors.ranks, factors.starts, groups.order, groups.starts, groups.slots,
        y.shape[1], MAX_RANK=max_rank, BLOCK_T=MAX_GROUP_LEN, BLOCK_R=block_rank,
        BLOCK_N=block_outputs, num_warps=4, num_stages=2,
    )  # fmt: skip
