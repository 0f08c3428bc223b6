"""Linear layers in float8 with a scale per group of 128 inputs, of weights and of tokens.

Tensor cores multiply 8-bit numbers. A sum ends with its group and is scaled in float32, since their own sums of
float8 products have few bits (DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, section 3.3.2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized_linear import FLOAT8_GROUP, QuantizedWeight, quantize_tokens
from .quantized_linear import TileConfig
from .tile_configs import INTERPRETED, MIN_ROWS

# largest number of tokens |-> tile. Chosen by the compiler's report, not yet by measurement.
TILES: dict[int, TileConfig] = {
    16: TileConfig(MIN_ROWS, 64, FLOAT8_GROUP, 4, 5),
    64: TileConfig(64, 64, FLOAT8_GROUP, 4, 4),
    1 << 31: TileConfig(128, 128, FLOAT8_GROUP, 8, 3),
}
# Programs that fill a GPU. Products with fewer tiles are divided by their inputs, and their parts added.
NUM_PROGRAMS = 128


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_groups(
    x_ptr,  # [T, K] float8
    token_scales_ptr,  # [T, G] float32
    codes_ptr,  # [N, K] float8
    scales_ptr,  # [G, N]
    bias_ptr,  # [N]
    out_ptr,  # [P, T, N]
    num_tokens,
    out_features,
    in_features,
    num_groups,
    groups_per_part,
    GROUP_LEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    # grid: (tiles of N, tiles of T, P)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(2)
    mask_n, mask_t = offs_n < out_features, offs_t < num_tokens
    offs_k = tl.arange(0, GROUP_LEN)
    row_ptrs = codes_ptr + offs_n[:, None].to(tl.int64) * in_features + offs_k[None, :]
    token_ptrs = x_ptr + offs_t[None, :].to(tl.int64) * in_features + offs_k[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    # With the number of stages, scales are copied ahead as well, although they are no factor of the product.
    end = tl.minimum((part + 1) * groups_per_part, num_groups)
    for group in tl.range(part * groups_per_part, end, num_stages=NUM_STAGES):
        codes = tl.load(row_ptrs + group * GROUP_LEN, mask=mask_n[:, None], other=0.0)
        x = tl.load(token_ptrs + group * GROUP_LEN, mask=mask_t[None, :], other=0.0)
        scales = tl.load(scales_ptr + group * out_features + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        factors = tl.load(token_scales_ptr + offs_t * num_groups + group, mask=mask_t, other=0.0)
        if UPCAST:
            codes, x = codes.to(tl.float32), x.to(tl.float32)
        sums += tl.dot(codes, x) * scales[:, None] * factors[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    rows = part.to(tl.int64) * num_tokens + offs_t
    tl.store(
        out_ptr + rows[None, :] * out_features + offs_n[:, None], sums, mask=mask_n[:, None] & mask_t[None, :]
    )


def float8_groups_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """See kernels.quantized_linear."""
    (num_tokens, in_features), out_features = x.shape, weight.out_features
    num_groups = in_features // FLOAT8_GROUP
    assert weight.codes.is_contiguous()
    assert weight.scales.is_contiguous()
    assert weight.scales.shape == (num_groups, out_features)
    if num_tokens == 0:
        return x.new_empty(0, out_features)
    tokens, token_scales = quantize_tokens(x.reshape(-1, FLOAT8_GROUP))
    tile = next(tile for max_tokens, tile in TILES.items() if num_tokens <= max_tokens)
    tiles = triton.cdiv(out_features, tile.num_outputs), triton.cdiv(num_tokens, tile.num_tokens)
    groups_per_part = triton.cdiv(num_groups, max(1, NUM_PROGRAMS // (tiles[0] * tiles[1])))
    num_parts = triton.cdiv(num_groups, groups_per_part)
    dtype = x.dtype if num_parts == 1 else torch.float32
    out = torch.empty(num_parts, num_tokens, out_features, dtype=dtype, device=x.device)
    _multiply_groups[(*tiles, num_parts)](
        tokens, token_scales, weight.codes, weight.scales, bias if num_parts == 1 else None, out, num_tokens,
        out_features, in_features, num_groups, groups_per_part,
        GROUP_LEN=FLOAT8_GROUP, BLOCK_T=tile.num_tokens, BLOCK_N=tile.num_outputs, UPCAST=INTERPRETED,
        NUM_STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip
    if num_parts == 1:
        return out[0]
    total = out.sum(dim=0)
    return (total if bias is None else total.add_(bias)).to(x.dtype)
