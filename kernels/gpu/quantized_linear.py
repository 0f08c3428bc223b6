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
    16: TileConfig(MIN_ROWS, 32, 256, 4, 4),
    64: TileConfig(64, 64, 128, 4, 4),
    1 << 31: TileConfig(128, 128, 64, 8, 3),
}
FLOAT32_TILE = TileConfig(MIN_ROWS, 32, 64, 4, 2)
# The least sum length of tl.dot is 16; a byte of packed weights has two numbers.
MIN_INPUTS = 32
# Multiplies a float32 with the exponent of a float4 number in its lowest bits: the biases are 127 and 1.
_FLOAT4_FACTOR = tl.constexpr(2.0**126)


@triton.jit
def _float4_to_float32(codes):
    """Convert float4 codes (e2m1: sign, two bits of exponent, one of mantissa), one per byte.

    They become the highest bits of a float32's mantissa and the lowest of its exponent. Numbers below 1 are subnormal
    in both.
    """
    codes = codes.to(tl.uint32)
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * _FLOAT4_FACTOR


@triton.jit
def _load_of_groups(
    ptr, first_n, groups, mask_g, out_features, BLOCK_N: tl.constexpr, HAS_PAIRS: tl.constexpr
):
    """Return numbers [G, N] of groups and outputs as [N, groups] float32; those past the last output are 0.

    Neighbors of 2 bytes are loaded as one number of 4, the least that a copy to shared memory has: loads that are not
    such copies delay the products of each iteration.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    if HAS_PAIRS and dtype.primitive_bitwidth == 16:
        offs_pair = first_n // 2 + tl.arange(0, BLOCK_N // 2)
        mask = (offs_pair < out_features // 2)[:, None] & mask_g[None, :]
        pair_ptrs = ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + groups[None, :] * (out_features // 2)
        pairs = tl.load(pair_ptrs + offs_pair[:, None], mask=mask, other=0)
        evens = (pairs & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        odds = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
        numbers = tl.permute(tl.join(evens, odds), (0, 2, 1))
        numbers = tl.reshape(numbers, (BLOCK_N, groups.shape[0]))
    else:
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask = (offs_n < out_features)[:, None] & mask_g[None, :]
        numbers = tl.load(ptr + groups[None, :] * out_features + offs_n[:, None], mask=mask, other=0)
    return numbers.to(tl.float32)


@triton.jit
def load_weights(
    row_ptrs, scales_ptr, zeros_ptr, group_index_ptr, first_n, start, out_features, in_features, bytes_per_row,
    group_len, NUMBERS_PER_BYTE: tl.constexpr, IS_PER_OUTPUT: tl.constexpr, IS_FLOAT4: tl.constexpr,
    NUM_GROUPS: tl.constexpr, HAS_PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the weights of outputs from `first_n` and inputs from `start` on, [BLOCK_N, BLOCK_K] float32.

    The bytes of an output lie behind one another, so that a thread loads 16 of them, and the two numbers of a byte
    become neighbors without leaving the thread.

    Args:
        row_ptrs: [N], of the codes of each output.
        scales_ptr, zeros_ptr: [G, N]. With one scale per output weights stay unscaled.
        NUM_GROUPS: groups of inputs in the tile, if there is no `group_index_ptr`.
        HAS_PAIRS: the number of outputs is even, and scales and zeros are aligned to 4 bytes.
    """
    mask_n = first_n + tl.arange(0, BLOCK_N) < out_features
    offs_byte = start // NUMBERS_PER_BYTE + tl.arange(0, BLOCK_K // NUMBERS_PER_BYTE)
    mask = mask_n[:, None] & (offs_byte < bytes_per_row)[None, :]
    codes = tl.load(row_ptrs[:, None] + offs_byte[None, :], mask=mask, other=0.0)
    if NUMBERS_PER_BYTE == 2:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), (BLOCK_N, BLOCK_K))
    if IS_FLOAT4:
        weights = _float4_to_float32(codes)
    else:
        weights = codes.to(tl.float32)
    if not IS_PER_OUTPUT:
        if group_index_ptr is not None:
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_g = offs_k < in_features
            groups = tl.load(group_index_ptr + offs_k, mask=mask_g, other=0)
            weights = weights[:, :, None]
        else:
            groups = start // group_len + tl.arange(0, NUM_GROUPS)
            mask_g = groups * group_len < in_features
            weights = tl.reshape(weights, (BLOCK_N, NUM_GROUPS, BLOCK_K // NUM_GROUPS))
        if zeros_ptr is not None:
            zeros = _load_of_groups(zeros_ptr, first_n, groups, mask_g, out_features, BLOCK_N, HAS_PAIRS)
            weights -= zeros[:, :, None]
        scales = _load_of_groups(scales_ptr, first_n, groups, mask_g, out_features, BLOCK_N, HAS_PAIRS)
        weights = tl.reshape(weights * scales[:, :, None], (BLOCK_N, BLOCK_K))
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
    bytes_per_row,
    group_len,
    stride_x,
    NUMBERS_PER_BYTE: tl.constexpr,
    IS_PER_OUTPUT: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # grid: (tiles of N, tiles of T)
    first_n = tl.program_id(0) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_n, mask_t = offs_n < out_features, offs_t < num_tokens
    row_ptrs = codes_ptr + offs_n.to(tl.int64) * bytes_per_row
    token_ptrs = x_ptr + offs_t[None, :].to(tl.int64) * stride_x
    # Weights are the first factor: it may come from registers, while the tokens stay where they are copied to.
    sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        weights = load_weights(
            row_ptrs, scales_ptr, zeros_ptr, group_index_ptr, first_n, start, out_features, in_features,
            bytes_per_row, group_len, NUMBERS_PER_BYTE, IS_PER_OUTPUT, IS_FLOAT4, NUM_GROUPS, HAS_PAIRS, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip
        offs_k = start + tl.arange(0, BLOCK_K)
        mask = (offs_k < in_features)[:, None] & mask_t[None, :]
        x = tl.load(token_ptrs + offs_k[:, None], mask=mask, other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
        sums = tl.dot(weights.to(x.dtype), x, sums, input_precision="tf32x3")
    if IS_PER_OUTPUT:
        sums *= tl.load(scales_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + offs_t[None, :].to(tl.int64) * out_features + offs_n[:, None]
    tl.store(out_ptrs, sums, mask=mask_n[:, None] & mask_t[None, :])


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
    num_groups = weight.scales.shape[0]
    tile = _find_tile(num_tokens, x.dtype)
    tile, groups_per_tile, group_index = divide_groups(tile, in_features, num_groups, weight.group_index, x)
    grid = triton.cdiv(out_features, tile.num_outputs), triton.cdiv(num_tokens, tile.num_tokens)
    _quantized_linear[grid](
        x, as_bytes(weight.codes), weight.scales, weight.zeros, group_index, bias, out, num_tokens, out_features,
        in_features, weight.codes.shape[1], in_features // num_groups, x.stride(0),
        NUMBERS_PER_BYTE=2 if weight.is_packed else 1, IS_PER_OUTPUT=weight.is_per_output,
        IS_FLOAT4=weight.codes.dtype == FLOAT4, NUM_GROUPS=groups_per_tile,
        HAS_PAIRS=has_pairs(weight.scales, weight.zeros), BLOCK_T=tile.num_tokens, BLOCK_N=tile.num_outputs,
        BLOCK_K=tile.num_inputs, UPCAST=INTERPRETED, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def divide_groups(
    tile: TileConfig, in_features: int, num_groups: int, group_index: Tensor | None, x: Tensor
) -> tuple[TileConfig, int, Tensor | None]:
    """Return a tile whose inputs are whole groups, or part of one, the number of groups, and each input's group.

    Groups of other lengths than a multiple of 16 and of a power of two are looked up for each input.

    Args:
        group_index: of the weight; see QuantizedWeight.
        x: tokens, on the device.
    """
    if group_index is not None or num_groups == 1:
        return tile, 1, group_index
    group_len = in_features // num_groups
    factor = group_len & -group_len  # the largest power of two in it
    if factor == group_len and group_len <= tile.num_inputs:
        return tile, tile.num_inputs // group_len, None
    if factor >= MIN_INPUTS:
        return tile._replace(num_inputs=min(tile.num_inputs, factor)), 1, None
    index = torch.arange(in_features, dtype=torch.int32, device=x.device) // group_len
    return tile._replace(num_inputs=MIN_INPUTS), 1, index


def has_pairs(*numbers: Tensor | None) -> bool:
    """Return whether numbers of 2 bytes may be loaded in pairs: those of a group are even in number, and aligned."""
    return all(each is None or (each.shape[-1] % 2 == 0 and each.data_ptr() % 4 == 0) for each in numbers)


def as_bytes(codes: Tensor) -> Tensor:
    """Return codes in a dtype that Triton knows: bytes instead of float4."""
    return codes.view(torch.uint8) if codes.dtype == FLOAT4 else codes


def _find_tile(num_tokens: int, dtype: torch.dtype) -> TileConfig:
    if dtype == torch.float32:
        return FLOAT32_TILE
    return next(tile for max_tokens, tile in TILES.items() if num_tokens <= max_tokens)
