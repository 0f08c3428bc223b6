"""Weights of linear layers that lie in panels, and the C++ ops on them (native/linear.cpp)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .library import library
from .ops import DTYPES, address_of

# Outputs of a panel.
PANEL_LEN = 64

STORED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


@dataclass(frozen=True, slots=True)
class Panels:
    """Where the weight [N, K] of a linear layer lies as [N / 64, padded K / R, 64, R], where R is row_inputs.

    Attributes:
        address: of the first number; whoever has this keeps the memory.
        stride: numbers of a panel.
        dtype: float32, bfloat16 or int8.
        scales: [N] float32, what each output's products are multiplied by; None: 1.
    """

    address: int
    stride: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    scales: Tensor | None = None


def row_inputs(dtype: torch.dtype) -> int:
    """Inputs that share a row of a panel: an output's numbers fill 32 bits of it."""
    return 4 // dtype.itemsize


@functools.cache
def max_linear_tokens() -> int:
    """Up to how many tokens panel_linear is faster than oneDNN, if that multiplies in the weight's dtype."""
    return int(library().quire_max_linear_tokens())


def panel_linear(x: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
    """A linear layer.

    Args:
        x: [T, K], in the weight's dtype, or in float32 or bfloat16 if that is int8.
        bias: [N] or None, in the dtype of x.

    Returns:
        [T, N], in the dtype of x.
    """
    num_tokens, in_features = x.shape
    assert x.is_contiguous()
    assert in_features == panels.in_features
    assert panels.dtype in (x.dtype, torch.int8)
    assert bias is None or bias.dtype == x.dtype
    out = torch.empty((num_tokens, panels.out_features), dtype=x.dtype)
    library().quire_linear(
        STORED[panels.dtype], DTYPES[x.dtype], x.data_ptr(), panels.address, address_of(panels.scales),
        address_of(bias), out.data_ptr(), num_tokens, in_features, panels.out_features, panels.stride,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def panel_rows(panels: Panels, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the weight in float32 or bfloat16, [T, K]; ids [T] int64."""
    assert ids.dtype == torch.int64
    out = torch.empty((len(ids), panels.in_features), dtype=dtype)
    library().quire_panel_rows(
        STORED[panels.dtype], DTYPES[dtype], panels.address, address_of(panels.scales), ids.data_ptr(),
        out.data_ptr(), len(ids), panels.in_features, panels.stride, torch.get_num_threads(),
    )  # fmt: skip
    return out
