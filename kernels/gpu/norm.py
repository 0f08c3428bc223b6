"""RMSNorm, alone and after the residual addition, each number read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(
    x_ptr,  # [T, E]
    residual_ptr,  # [T, E]
    weight_ptr,  # [E]
    out_ptr,  # [T, E]
    eps,
    stride_x,
    stride_residual,
    NUM_COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
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
    tl.store(out_ptr + row * NUM_COLUMNS + offs_e, x * factor * weight, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels.norm."""
    return _launch(x.reshape(-1, x.shape[-1]), None, weight, eps).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels.norm; the norm is of the sum before it is rounded."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_rows, num_columns = x.shape
    assert x.stride(1) == 1
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    block = triton.next_power_of_2(num_columns)
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    _rms_norm[(num_rows,)](
        x, residual, weight, out, eps, x.stride(0), 0 if residual is None else residual.stride(0),
        NUM_COLUMNS=num_columns, HAS_RESIDUAL=residual is not None,
        BLOCK_E=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out
