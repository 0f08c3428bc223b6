"""Quantization of tokens to float8, one scale per token, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized_linear import FLOAT8, LARGEST
from .norm import round_to_float8


@triton.jit
def _quantize_tokens(
    x_ptr,  # [T, K]
    codes_ptr,  # [T, K] float8
    scales_ptr,  # [T]
    num_columns,
    stride_x,
    LIMIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: (T,)
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    mask = offs_k < num_columns
    x = tl.load(x_ptr + row * stride_x + offs_k, mask=mask, other=0.0).to(tl.float32)
    codes, scale = round_to_float8(x, LIMIT)
    tl.store(codes_ptr + row * num_columns + offs_k, codes.to(codes_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + row, scale)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels.quantized_linear."""
    num_rows, num_columns = x.shape
    assert x.stride(1) == 1
    codes = torch.empty((num_rows, num_columns), dtype=FLOAT8, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(num_columns)
        _quantize_tokens[(num_rows,)](
            x, codes, scales, num_columns, x.stride(0), LIMIT=LARGEST[FLOAT8], BLOCK_K=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return codes, scales
