"""RMSNorm, with and without a residual addition; each number is read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized_linear import FLOAT8, LARGEST


@triton.jit
def round_to_float8(numbers, LIMIT: tl.constexpr):
    """Scale [C] float32 to the range of float8. Returns codes, still float32, and the scale that multiplies them."""
    largest = tl.max(tl.abs(numbers), 0)
    scale = tl.where(largest > 0, largest / LIMIT, 1.0)
    return tl.minimum(tl.maximum(numbers / scale, -LIMIT), LIMIT), scale


@triton.jit
def _rms_norm(
    x_ptr,  # [T, E]
    residual_ptr,  # [T, E]
    weight_ptr,  # [E]
    out_ptr,  # [T, E]
    scales_ptr,  # [T], or None if the result is not float8
    eps,
    stride_x,
    stride_residual,
    NUM_COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # grid: (T,)
    row = tl.program_id(0).to(tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    mask = offs_e < NUM_COLUMNS
    x = tl.load(x_ptr + row * stride_x + offs_e, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + row * stride_residual + offs_e
        x += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_ptrs, x, mask=mask)
    weight = tl.load(weight_ptr + offs_e, mask=mask, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / NUM_COLUMNS + eps)
    out = x * factor * weight
    if scales_ptr is not None:
        out, scale = round_to_float8(out, LIMIT)
        tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * NUM_COLUMNS + offs_e, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels.norm."""
    rows = x.reshape(-1, x.shape[-1])
    out = _empty(rows, x.dtype)
    _launch(rows, None, weight, eps, out, None)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels.norm; the norm is that of the unrounded sum."""
    out = _empty(x, x.dtype)
    _launch(x, residual, weight, eps, out, None)
    return out


def add_rms_norm_float8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See kernels.norm; only the residual and the codes are rounded."""
    out = _empty(x, FLOAT8)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    _launch(x, residual, weight, eps, out, scales)
    return out, scales


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None
) -> None:
    num_rows, num_columns = x.shape
    assert x.stride(1) == 1
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    block = triton.next_power_of_2(num_columns)
    _rms_norm[(num_rows,)](
        x, residual, weight, out, scales, eps, x.stride(0), 0 if residual is None else residual.stride(0),
        NUM_COLUMNS=num_columns, HAS_RESIDUAL=residual is not None, LIMIT=LARGEST[FLOAT8],
        BLOCK_E=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
