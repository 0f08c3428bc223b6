"""Linear layers of a mixture of experts: one launch for the tokens of all experts.

A program computes a tile of one expert's choices and outputs. How many tiles an expert has is known on the device
only, so each program finds its own by summing the tiles of the experts before it. The grid has room for any
distribution of the choices; superfluous programs end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..moe import ExpertChoices, ExpertWeights
from ..quantized_linear import FLOAT4
from .quantized_linear import TileConfig, as_bytes, divide_groups, has_pairs, load_weights
from .tile_configs import INTERPRETED, MIN_ROWS

# Choices that a program of the sort compares per iteration.
BLOCK_CHOICES = 1024

# largest mean number of choices per expert |-> tile. Few are bound by reading the weights.
# Chosen by the compiler's report for compute capabilities 8.0 and 9.0, not yet by measurement.
TILES: dict[int, TileConfig] = {
    16: TileConfig(MIN_ROWS, 64, 128, 4, 4),
    64: TileConfig(64, 128, 64, 4, 4),
    1 << 31: TileConfig(128, 128, 64, 8, 3),
}
# Of packed weights: few choices read 256 inputs of 32 outputs at a time, 16 bytes per thread and copy.
PACKED_TILES: dict[int, TileConfig] = {
    16: TileConfig(MIN_ROWS, 32, 256, 4, 4),
    64: TileConfig(64, 64, 128, 4, 4),
    1 << 31: TileConfig(128, 128, 64, 8, 3),
}
FLOAT32_TILE = TileConfig(MIN_ROWS, 32, 64, 4, 2)
# Tiles of choices that share the outputs' weights in the L2 cache while they run.
TILES_PER_GROUP = 8


@triton.jit(do_not_specialize=["num_choices", "first_expert"])
def _sort_choices(
    expert_ids_ptr,  # [P]
    order_ptr,  # [P]
    starts_ptr,  # [X + 1]
    num_choices,
    first_expert,
    BLOCK_P: tl.constexpr,
):
    # grid: (X,)
    index = tl.program_id(0)
    expert = first_expert + index
    offs_p = tl.arange(0, BLOCK_P)
    before = tl.zeros([BLOCK_P], tl.int32)
    for start in range(0, num_choices, BLOCK_P):
        mask = start + offs_p < num_choices
        expert_ids = tl.load(expert_ids_ptr + start + offs_p, mask=mask, other=expert)
        before += ((expert_ids >= first_expert) & (expert_ids < expert)).to(tl.int32)
    position = tl.sum(before, 0)
    tl.store(starts_ptr + index, position)
    for start in range(0, num_choices, BLOCK_P):
        mask = start + offs_p < num_choices
        expert_ids = tl.load(expert_ids_ptr + start + offs_p, mask=mask, other=-1)
        ones = (expert_ids == expert).to(tl.int32)
        places = position + tl.cumsum(ones, 0) - ones
        tl.store(order_ptr + places, start + offs_p, mask=ones == 1)
        position += tl.sum(ones, 0)
    if index == tl.num_programs(0) - 1:
        tl.store(starts_ptr + index + 1, position)


@triton.jit
def _find_tile(starts_ptr, tile, num_experts, BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr):
    """Return the expert of a tile of choices, and the first and the end of the tile; expert X if there is no tile."""
    offs_x = tl.arange(0, BLOCK_X)
    mask_x = offs_x < num_experts
    starts = tl.load(starts_ptr + offs_x, mask=mask_x, other=0)
    ends = tl.load(starts_ptr + offs_x + 1, mask=mask_x, other=0)
    num_tiles = (ends - starts + BLOCK_T - 1) // BLOCK_T
    tile_ends = tl.cumsum(num_tiles, 0)
    expert = tl.sum((mask_x & (tile_ends <= tile)).to(tl.int32), 0)
    is_own = offs_x == expert
    first = tl.sum(tl.where(is_own, starts + (tile - tile_ends + num_tiles) * BLOCK_T, 0), 0)
    return expert, first, tl.sum(tl.where(is_own, ends, 0), 0)


@triton.jit
def _place_program(program, num_tiles, num_columns, TILES_PER_GROUP: tl.constexpr):
    """Return the tile of choices and the tile of outputs of a program: groups of tiles share weights and tokens."""
    programs_per_group = TILES_PER_GROUP * num_columns
    first = program // programs_per_group * TILES_PER_GROUP
    group_len = tl.minimum(num_tiles - first, TILES_PER_GROUP)
    within = program % programs_per_group
    return first + within % group_len, within // group_len


@triton.jit(do_not_specialize=["num_tiles"])
def _expert_linear(
    x_ptr,  # [T, K], or [P, K] by expert with factors
    codes_ptr,  # [X, N, K], or [X, N, K / 2] uint8
    scales_ptr,  # [X, G, N]
    zeros_ptr,  # [X, G, N] int16
    group_index_ptr,  # [X, K] int32
    bias_ptr,  # [X, N]
    order_ptr,  # [P]
    starts_ptr,  # [X + 1]
    factors_ptr,  # [P] float32
    out_ptr,  # [P, N], by expert, or by choice with factors
    num_tiles,
    num_experts,
    out_features,
    in_features,
    bytes_per_row,
    num_groups,
    group_len,
    stride_x,
    stride_index,
    PER_TOKEN: tl.constexpr,
    NUMBERS_PER_BYTE: tl.constexpr,
    IS_PER_OUTPUT: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    TILES_PER_GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # grid: (tiles of choices * tiles of N,)
    tile, column = _place_program(
        tl.program_id(0), num_tiles, tl.cdiv(out_features, BLOCK_N), TILES_PER_GROUP
    )
    expert, first, end = _find_tile(starts_ptr, tile, num_experts, BLOCK_T, BLOCK_X)
    if expert >= num_experts:
        return
    offs_t = first + tl.arange(0, BLOCK_T)
    offs_n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_t, mask_n = offs_t < end, offs_n < out_features
    choices = tl.load(order_ptr + offs_t, mask=mask_t, other=0)
    if factors_ptr is None:
        sources, targets = choices // PER_TOKEN, offs_t
    else:
        sources, targets = offs_t, choices
    token_ptrs = x_ptr + sources[None, :].to(tl.int64) * stride_x
    rows = expert.to(tl.int64) * out_features + offs_n
    row_ptrs = codes_ptr + rows * bytes_per_row
    offs_group = expert.to(tl.int64) * num_groups * out_features
    if scales_ptr is not None:
        scales_ptr += offs_group
    if zeros_ptr is not None:
        zeros_ptr += offs_group
    if group_index_ptr is not None:
        group_index_ptr += expert * stride_index
    sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < in_features
        if scales_ptr is not None:
            weights = load_weights(
                row_ptrs, scales_ptr, zeros_ptr, group_index_ptr, column * BLOCK_N, start, out_features, in_features,
                bytes_per_row, group_len, NUMBERS_PER_BYTE, IS_PER_OUTPUT, IS_FLOAT4, NUM_GROUPS, HAS_PAIRS, BLOCK_N,
                BLOCK_K,
            )  # fmt: skip
        else:
            mask = mask_n[:, None] & mask_k[None, :]
            weights = tl.load(row_ptrs[:, None] + offs_k[None, :], mask=mask, other=0.0)
        x = tl.load(token_ptrs + offs_k[:, None], mask=mask_k[:, None] & mask_t[None, :], other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
        sums = tl.dot(weights.to(x.dtype), x, sums, input_precision="tf32x3")
    if IS_PER_OUTPUT:
        sums *= tl.load(scales_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    if bias_ptr is not None:
        biases = tl.load(bias_ptr + expert.to(tl.int64) * out_features + offs_n, mask=mask_n, other=0.0)
        sums += biases.to(tl.float32)[:, None]
    if factors_ptr is not None:
        sums *= tl.load(factors_ptr + choices, mask=mask_t, other=0.0)[None, :]
    out_ptrs = out_ptr + targets[None, :].to(tl.int64) * out_features + offs_n[:, None]
    tl.store(out_ptrs, sums, mask=mask_n[:, None] & mask_t[None, :])


def sort_choices(expert_ids: Tensor, num_experts: int, own: range | None = None) -> ExpertChoices:
    """See kernels.moe."""
    own = range(num_experts) if own is None else own
    num_choices = expert_ids.numel()
    assert expert_ids.is_contiguous()
    # The entries after the last of `own` are read as choices, so they must be valid.
    make_order = torch.empty if len(own) == num_experts else torch.zeros
    order = make_order(num_choices, dtype=torch.int32, device=expert_ids.device)
    starts = torch.empty(len(own) + 1, dtype=torch.int32, device=expert_ids.device)
    _sort_choices[(len(own),)](expert_ids, order, starts, num_choices, own.start, BLOCK_P=BLOCK_CHOICES)
    return ExpertChoices(order, starts, expert_ids.shape[1], num_experts)


def scatter_linear(x: Tensor, weights: ExpertWeights, choices: ExpertChoices) -> Tensor:
    """See kernels.moe."""
    return _launch(x, weights, choices, None)


def gather_linear(x: Tensor, weights: ExpertWeights, choices: ExpertChoices, factors: Tensor) -> Tensor:
    """See kernels.moe. The terms of a token are rounded to the dtype of x before they are added."""
    return gather_terms(x, weights, choices, factors).view(*factors.shape, -1).sum(dim=1)


def gather_terms(x: Tensor, weights: ExpertWeights, choices: ExpertChoices, factors: Tensor) -> Tensor:
    """See kernels.moe."""
    assert factors.is_contiguous()
    assert factors.dtype == torch.float32
    return _launch(x, weights, choices, factors)


def _launch(x: Tensor, weights: ExpertWeights, choices: ExpertChoices, factors: Tensor | None) -> Tensor:
    """Multiply tokens, or with factors rows by expert; return [P, N]."""
    num_experts, out_features, _ = weights.codes.shape
    in_features, num_choices = x.shape[1], choices.order.shape[0]
    numbers_per_byte = 2 if weights.is_packed else 1
    assert weights.codes.is_contiguous()
    assert weights.codes.shape[2] * numbers_per_byte == in_features
    assert x.stride(1) == 1
    # Choices of other ranks' experts have no program, and add 0 to their token.
    make_out = torch.zeros if choices.is_partial and factors is not None else torch.empty
    out = make_out((num_choices, out_features), dtype=x.dtype, device=x.device)
    tile = find_tile(num_choices / choices.num_experts, weights, x)
    scales = weights.scales
    num_groups = 1 if scales is None else scales.shape[1]
    is_per_output = scales is not None and num_groups == 1 and weights.zeros is None
    tile, groups_per_tile, group_index = divide_groups(tile, in_features, num_groups, weights.group_index, x)
    # An expert without choices has no tile, and each other expert at most one that is not full.
    num_tiles = min(num_choices, num_choices // tile.num_tokens + num_experts)
    grid = (num_tiles * triton.cdiv(out_features, tile.num_outputs),)
    _expert_linear[grid](
        x, as_bytes(weights.codes), scales, weights.zeros, group_index, weights.bias, choices.order,
        choices.starts, factors, out, num_tiles, num_experts, out_features, in_features, weights.codes.shape[2],
        num_groups, in_features // num_groups, x.stride(0),
        0 if weights.group_index is None else in_features,
        PER_TOKEN=choices.top_k, NUMBERS_PER_BYTE=numbers_per_byte, IS_PER_OUTPUT=is_per_output,
        IS_FLOAT4=weights.codes.dtype == FLOAT4, NUM_GROUPS=groups_per_tile,
        HAS_PAIRS=has_pairs(scales, weights.zeros), TILES_PER_GROUP=TILES_PER_GROUP, BLOCK_T=tile.num_tokens,
        BLOCK_N=tile.num_outputs,
        BLOCK_K=tile.num_inputs, BLOCK_X=triton.next_power_of_2(num_experts), UPCAST=INTERPRETED,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def find_tile(mean_choices: float, weights: ExpertWeights, x: Tensor) -> TileConfig:
    """Return the tile for a mean number of choices per expert, of tokens x."""
    if x.dtype == torch.float32:
        return FLOAT32_TILE
    table = PACKED_TILES if weights.is_packed else TILES
    return next(tile for mean, tile in table.items() if mean_choices <= mean)
