"""Packed weights of linear layers (native/packed_weights.h), and C++ ops on them (native/linear.cpp)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .library import constants, dtype_codes, gate_codes, library
from .ops import address_of


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The weight [N, K] of a linear layer in memory as [N / panel_len(), K / R, panel_len(), R].

    R is inputs_per_row(dtype). N is padded to whole panels.

    Attributes:
        address: of the first number; the owner of this object keeps the memory alive.
        stride: numbers per panel.
        dtype: float32, bfloat16, float16 or int8.
        scales: [N] float32, multiply each output's products; None: 1.
    """

    address: int
    stride: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    scales: Tensor | None = None


@functools.cache
def panel_len() -> int:
    """Return the outputs per panel."""
    return constants()["panel_len"]


def inputs_per_row(dtype: torch.dtype) -> int:
    """Return the inputs that share a row of a panel: those of one output fill 32 bits, except in float16."""
    return 1 if dtype == torch.float16 else 4 // dtype.itemsize


def packed_linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Compute a linear layer.

    Args:
        x: [T, K], in the weight's dtype; in float32 too if the weight is in bfloat16, and in any if it is int8.
        bias: [N] or None, in the dtype of x.

    Returns:
        [T, N], in the dtype of x.
    """
    num_tokens, in_features = x.shape
    _check(x, matrix, bias)
    out = torch.empty((num_tokens, matrix.out_features), dtype=x.dtype)
    codes = dtype_codes()
    library().quire_linear(
        codes[matrix.dtype], codes[x.dtype], x.data_ptr(), matrix.address, address_of(matrix.scales),
        address_of(bias), out.data_ptr(), num_tokens, in_features, matrix.out_features, matrix.stride,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def packed_linear_heads(x: Tensor, matrix: PackedMatrix, num_heads: int, out_features: int) -> Tensor:
    """Multiply each head by a weight of its own.

    Args:
        x: [T, H, K], in the weight's dtype; numbers of a head are adjacent.
        matrix: the weights [N, K] of all heads, each padded to whole panels; without scales.
        out_features: N.

    Returns:
        [T, H, N].
    """
    num_tokens, _, in_features = x.shape
    assert x.dtype == matrix.dtype
    assert x.stride(2) == 1
    assert in_features == matrix.in_features
    out = torch.empty((num_tokens, num_heads, out_features), dtype=x.dtype)
    library().quire_linear_heads(
        dtype_codes()[x.dtype], x.data_ptr(), matrix.address, out.data_ptr(), num_tokens, num_heads, x.stride(0),
        x.stride(1), in_features, out_features, torch.get_num_threads(),
    )  # fmt: skip
    return out


def can_gate(matrix: PackedMatrix) -> bool:
    """Return whether `gated_packed_linear` supports this weight: both halves of its outputs are whole panels."""
    return matrix.out_features % (2 * panel_len()) == 0


def gated_packed_linear(x: Tensor, matrix: PackedMatrix, gate: str, bias: Tensor | None) -> Tensor:
    """Compute a linear layer and the gated activation of its outputs, without storing these for many tokens.

    The result is bit for bit that of both ops.

    Args:
        x: as for `packed_linear`.
        matrix: a weight that `can_gate`.
        gate: name of the activation (native/constants.h).
        bias: as for `packed_linear`.

    Returns:
        [T, N / 2], in the dtype of x.
    """
    num_tokens, in_features = x.shape
    _check(x, matrix, bias)
    assert can_gate(matrix)
    out = torch.empty((num_tokens, matrix.out_features // 2), dtype=x.dtype)
    codes = dtype_codes()
    library().quire_gated_linear(
        codes[matrix.dtype], codes[x.dtype], gate_codes()[gate], x.data_ptr(), matrix.address,
        address_of(matrix.scales), address_of(bias), out.data_ptr(), num_tokens, in_features, matrix.out_features,
        matrix.stride, torch.get_num_threads(),
    )  # fmt: skip
    return out


def gather_rows(matrix: PackedMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of the weight in a dtype of tokens: ids [T] int64 -> [T, K]."""
    assert ids.dtype == torch.int64
    out = torch.empty((len(ids), matrix.in_features), dtype=dtype)
    codes = dtype_codes()
    library().quire_gather_rows(
        codes[matrix.dtype], codes[dtype], matrix.address, address_of(matrix.scales), ids.data_ptr(),
        out.data_ptr(), len(ids), matrix.in_features, matrix.stride, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _check(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> None:
    assert x.is_contiguous()
    assert x.shape[1] == matrix.in_features
    assert matrix.dtype in (x.dtype, torch.int8) or (matrix.dtype, x.dtype) == (torch.bfloat16, torch.float32)
    assert bias is None or bias.dtype == x.dtype
