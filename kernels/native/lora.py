"""Structs and wrapper of quire_add_lora (native/lora.h): the same fields in the same order."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .library import dtype_codes, library


class Factors(ctypes.Structure):
    """The factors of one linear layer, see kernels.lora.LoraFactors."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "ranks", "starts")),
        *((name, ctypes.c_int64) for name in ("num_parts", "max_rank", "in_features", "out_features")),
    ]


class Groups(ctypes.Structure):
    """A step's tokens with adapters, see kernels.lora.LoraGroups."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("order", "inputs", "starts", "slots")),
        ("count", ctypes.c_int64),
    ]


@functools.cache
def check_layout() -> None:
    """Check that Python and C++ agree on the sizes of the structs.

    Raises:
        RuntimeError: they do not.
    """
    expected, size = library().quire_lora_bytes(), ctypes.sizeof(Factors) + ctypes.sizeof(Groups)
    if size != expected:
        raise RuntimeError(f"the structs have {expected} bytes in native/lora.h and {size} in native/lora.py")


def native_factors(a: Tensor, b: Tensor, ranks: Tensor, starts: Tensor) -> Factors:
    """Return the struct of an adapter's factors; the caller keeps the tensors alive."""
    _, num_parts, max_rank, in_features = a.shape
    assert all(each.is_contiguous() for each in (a, b, ranks, starts))
    assert ranks.dtype == starts.dtype == torch.int32
    return Factors(
        a.data_ptr(), b.data_ptr(), ranks.data_ptr(), starts.data_ptr(),
        num_parts, max_rank, in_features, b.shape[2],
    )  # fmt: skip


def native_groups(order: Tensor, inputs: Tensor, starts: Tensor, slots: Tensor) -> Groups:
    """Return the struct of groups of tokens; the caller keeps the tensors alive."""
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (order, inputs, starts, slots))
    return Groups(order.data_ptr(), inputs.data_ptr(), starts.data_ptr(), slots.data_ptr(), len(slots))


def add_lora(y: Tensor, x: Tensor, factors: Factors, groups: Groups) -> None:
    """See kernels.lora.

    Args:
        y: [T, N], contiguous.
        x: [T, K], contiguous, as many rows as `groups` refers to.
    """
    check_layout()
    assert x.dtype == y.dtype
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert x.shape[1] == factors.in_features
    assert y.shape[1] == factors.out_features
    library().quire_add_lora(
        dtype_codes()[x.dtype], ctypes.addressof(factors), ctypes.addressof(groups), x.data_ptr(), y.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
