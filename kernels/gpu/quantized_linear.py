"""Linear layers with weights of 8 or 4 bits, which are converted in registers before the tensor cores."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized_linear import FLOAT4, QuantizedWeight
from .tile_configs import INTERPRETED, MIN_ROWS


class TileConfig(NamedTuple):
    """Tile of one program.

    Attributes:
        num_inputs: largest number of inputs per iteration.
    """

    num_tokens: int
    num_outputs: int
    num_inputs: int
    num_warps: int
    num_stages: int


# largest number of tokens |-> tile. Few tokens are bound by reading the weight, which many small programs do fastest.
# Chosen by the compiler's report for compute capabilities 8.0 and 9.0, not yet by measurement.
TILES: dict[int, TileConfig] = {
    16: TileConfig(MIN_ROWS, 32, 128, 4, 4),
    64: TileConfig(64, 64, 64, 4, 4),
    1 << 31: TileConfig(128, 64, 64, 8, 3),
}
FLOAT32_TILE = TileConfig(MIN_ROWS, 32, 64, 4, 2)
# Twice the least sum length of tl.dot: a byte with two weights takes part in two products.
MIN_INPUTS = 32


@triton.jit
def _float4_to_float32(codes):
    """Convert float4 codes (e2m1: sign, two bits of exponent, one of mantissa), one per byte."""
    magnitudes = (codes & 7).to(tl.int32)
    shifted = (2 + (magnitudes & 1)) << (tl.maximum(magnitudes >> 1, 1) - 1)
    halves = tl.where(magnitudes < 2, magnitudes, shifted).to(tl.float32) * 0.5
    return tl.where(codes < 8, halves, -halves)


@triton.jit
def to_weights(
    codes, scales_ptr, zeros_ptr, group_index_ptr, offs_k, offs_n, mask_k, mask_n, first_group, out_features,
    IS_PER_OUTPUT: tl.constexpr, IS_FLOAT4: tl.constexpr,
):  # fmt: skip
    """Convert codes [K, N] to float32 weights; they stay unscaled if there is one scale per output."""
    if IS_FLOAT4:
        weights = _float4_to_float32(codes)
    else:
        weights = codes.to(tl.float32)
    if not IS_PER_OUTPUT:
        if group_index_ptr is not None:
            groups = tl.load(group_index_ptr + offs_k, mask=mask_k, other=0)
            offs_group = groups[:, None] * out_features + offs_n[None, :]
            mask = mask_k[:, None] & mask_n[None, :]
        else:
            offs_group = first_group * out_features + offs_n[None, :]
            mask = mask_n[None, :]
        if zeros_ptr is not None:
            weights -= tl.load(zeros_ptr + offs_group, mask=mask, other=0).to(tl.float32)
        weights *= tl.load(scales_ptr + offs_group, mask=mask, other=0.0).to(tl.float32)
    return weights


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_linear(
    x_ptr,  # [T, K]
    codes_ptr,  # [N, K] int8 or float8; [N, K / 2] uint8, with IS_FLOAT4 of float4 codes
    scales_ptr,  # [G, N]
    zeros_ptr,  # [G, N] int16
    group_index_ptr,  # [K] int32
    bias_ptr,  # [N]
    out_ptr,  # [T, N]
    num_tokens,
    out_features,
    in_features,
    group_len,
    stride_x,
    NUMBERS_PER_BYTE: tl.constexpr,
    IS_PER_OUTPUT: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # grid: (tiles of N, tiles of T)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_n, mask_t = offs_n < out_features, offs_t < num_tokens
    bytes_per_row = in_features // NUMBERS_PER_BYTE
    row_ptrs = codes_ptr + offs_n[None, :].to(tl.int64) * bytes_per_row
    token_ptrs = x_ptr + offs_t[:, None].to(tl.int64) * stride_x
    offs_byte = tl.arange(0, BLOCK_K // NUMBERS_PER_BYTE)
    sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        offs_packed = start // NUMBERS_PER_BYTE + offs_byte
        live = offs_packed < bytes_per_row
        packed = tl.load(row_ptrs + offs_packed[:, None], mask=live[:, None] & mask_n[None, :], other=0.0)
        for part in tl.static_range(NUMBERS_PER_BYTE):
            offs_k = offs_packed * NUMBERS_PER_BYTE + part
            codes = packed
            if NUMBERS_PER_BYTE == 2:
                codes = (packed >> (4 * part)) & 15
            weights = to_weights(
                codes, scales_ptr, zeros_ptr, group_index_ptr, offs_k, offs_n, live, mask_n, start // group_len,
                out_features, IS_PER_OUTPUT, IS_FLOAT4,
            )  # fmt: skip
            x = tl.load(token_ptrs + offs_k[None, :], mask=mask_t[:, None] & live[None, :], other=0.0)
            if UPCAST:
                x = x.to(tl.float32)
            sums = tl.dot(x, weights.to(x.dtype), sums, input_precision="tf32x3")
    if IS_PER_OUTPUT:
        sums *= tl.load(scales_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_t[:, None].to(tl.int64) * out_features + offs_n[None, :]
    tl.store(out_ptrs, sums, mask=mask_t[:, None] & mask_n[None, :])


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """See kernels.quantized_linear."""
    (num_tokens, in_features), out_features = x.shape, weight.out_features
    assert in_features == weight.in_features
    assert x.stride(1) == 1
    assert weight.codes.is_contiguous()
    assert weight.scales.is_contiguous()
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    group_len = in_features // weight.scales.shape[0]
    tile = _find_tile(num_tokens, x.dtype)
    group_index = weight.group_index
    if group_index is None and weight.scales.shape[0] > 1:
        # Each iteration reads one group.
        tile = tile._replace(num_inputs=min(tile.num_inputs, group_len & -group_len))
        if tile.num_inputs < MIN_INPUTS:
            tile = tile._replace(num_inputs=MIN_INPUTS)
            group_index = torch.arange(in_features, dtype=torch.int32, device=x.device) // group_len
    grid = triton.cdiv(out_features, tile.num_outputs), triton.cdiv(num_tokens, tile.num_tokens)
    _quantized_linear[grid](
        x, as_bytes(weight.codes), weight.scales, weight.zeros, group_index, bias, out, num_tokens, out_features,
        in_features, group_len, x.stride(0),
        NUMBERS_PER_BYTE=2 if weight.is_packed else 1, IS_PER_OUTPUT=weight.is_per_output,
        IS_FLOAT4=weight.codes.dtype == FLOAT4, BLOCK_T=tile.num_tokens, BLOCK_N=tile.num_outputs,
        BLOCK_K=tile.num_inputs, UPCAST=INTERPRETED, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def as_bytes(codes: Tensor) -> Tensor:
    """Return codes in a dtype that Triton knows: bytes instead of float4."""
    return codes.view(torch.uint8) if codes.dtype == FLOAT4 else codes


def _find_tile(num_tokens: int, dtype: torch.dtype) -> TileConfig:
    if dtype == torch.float32:
        return FLOAT32_TILE
    return next(tile for max_tokens, tile in TILES.items() if num_tokens <= max_tokens)
