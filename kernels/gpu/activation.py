"""Activations of gated linear units in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_LEN = 1024


@triton.jit
def _gate_and_mul(
    gate_up_ptr,  # [T, 2 I]
    out_ptr,  # [T, I]
    num_columns,
    stride_gate_up,
    IS_GELU: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    # grid: (T, tiles of I)
    row = tl.program_id(0).to(tl.int64)
    offs_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = offs_i < num_columns
    gate_ptrs = gate_up_ptr + row * stride_gate_up + offs_i
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + num_columns, mask=mask, other=0.0).to(tl.float32)
    exponent = gate
    if IS_GELU:
        # (1 + tanh(u)) / 2 is sigmoid(2 u); the constant is 2 sqrt(2 / pi).
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out_ptr + row * num_columns + offs_i, gate * tl.sigmoid(exponent) * up, mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See kernels.activation."""
    return _launch(gate_up, is_gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """See kernels.activation."""
    return _launch(gate_up, is_gelu=True)


@triton.jit
def _clamped_gate_and_mul(
    gate_up_ptr,  # [T, 2 I]
    out_ptr,  # [T, I]
    num_columns,
    stride_gate_up,
    alpha,
    limit,
    offset,
    BLOCK_I: tl.constexpr,
):
    # grid: (T, tiles of I)
    row = tl.program_id(0).to(tl.int64)
    offs_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = offs_i < num_columns
    gate_ptrs = gate_up_ptr + row * stride_gate_up + offs_i
    gate = tl.minimum(tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32), limit)
    up = tl.load(gate_ptrs + num_columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out_ptr + row * num_columns + offs_i, gate * tl.sigmoid(gate * alpha) * (up + offset), mask=mask)


def clamped_silu_and_mul(gate_up: Tensor, alpha: float, limit: float, offset: float = 1.0) -> Tensor:
    """See kernels.activation."""
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    _clamped_gate_and_mul[(num_rows, triton.cdiv(num_columns, BLOCK_LEN))](
        gate_up, out, num_columns, gate_up.stride(0), alpha, limit, offset, BLOCK_I=BLOCK_LEN
    )
    return out


def _launch(gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    _gate_and_mul[(num_rows, triton.cdiv(num_columns, BLOCK_LEN))](
        gate_up, out, num_columns, gate_up.stride(0), IS_GELU=is_gelu, BLOCK_I=BLOCK_LEN
    )
    return out
