"""Weights of a CPU as records of plain values and places in memory, from which a process makes the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels.linear import Layout, PackedWeight
from ...kernels.native.packed_weights import PackedMatrix
from ...kernels.packed_quantized import PackedQuantized
from .linear_weight import LinearWeight, PackedCodes, PlainWeight, StackedWeight

# A record is a list of JSON values, of which the first names its type in _DECODERS.
Record = list[Any]
Weight = Tensor | PackedWeight | LinearWeight
# Stores the elements of a tensor and returns the tensor's record.
Store = Callable[[Tensor], Record]
# Returns the tensor of such a record.
Fetch = Callable[[Record], Tensor]

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float4_e2m1fn_x2,
    )
}


class NoRecordError(Exception):
    """A weight is in a form that has no record; the message names it."""


def to_record(weight: Weight, store: Store) -> Record:
    """Store the tensors of a weight and return its record.

    Raises:
        NoRecordError: the layout is private to oneDNN, or no record is defined for the type.
    """
    if isinstance(weight, Tensor):
        return store(weight)
    encode = _ENCODERS.get(type(weight))
    if encode is None:
        raise NoRecordError(f"a weight of type {type(weight).__name__}")
    return encode(weight, store)


def from_record(record: Record, fetch: Fetch) -> Any:
    """Return the weight of a record.

    Raises:
        ValueError: it is no record.
    """
    decode = _DECODERS.get(record[0])
    if decode is None:
        raise ValueError(f"there is no weight of type {record[0]!r}")
    return decode(record, fetch)


def tensor_record(tensor: Tensor, start: int) -> Record:
    """Return the record of a contiguous tensor whose first byte is at `start`.

    Raises:
        NoRecordError: the dtype is not one of a CPU's weights.
    """
    if str(tensor.dtype) not in _DTYPES:
        raise NoRecordError(f"a tensor of {tensor.dtype}")
    return ["tensor", start, str(tensor.dtype), list(tensor.shape)]


def tensor_at(record: Record, memory: Tensor) -> Tensor:
    """Return the tensor of a record by `tensor_record`, which shares its memory.

    Args:
        memory: [number of bytes] uint8.

    Raises:
        ValueError: the tensor is not within the memory.
    """
    _, start, dtype_name, shape = record
    tensor = torch.empty(shape, dtype=_DTYPES[dtype_name], device="meta")
    if not 0 <= start <= start + tensor.nbytes <= len(memory):
        raise ValueError(f"a tensor of {tensor.nbytes} bytes at {start} is not within {len(memory)} bytes")
    return memory[start : start + tensor.nbytes].view(tensor.dtype).view(shape)


def _packed_record(weight: PackedWeight, store: Store) -> Record:
    if weight.layout is Layout.ONE_DNN:
        raise NoRecordError("a weight in oneDNN's own layout")
    if weight.layout is Layout.PADDED:
        raise NoRecordError("a weight with inputs of zeros")
    stored, matrix = store(weight.weight), weight.matrix
    if matrix is None:
        return ["packed", stored, None]
    scales = None if matrix.scales is None else store(matrix.scales)
    features = matrix.in_features, matrix.out_features
    return ["packed", stored, [matrix.stride, *features, str(matrix.dtype), scales]]


def _packed(record: Record, fetch: Fetch) -> PackedWeight:
    _, stored, described = record
    weight = fetch(stored)
    if described is None:
        return PackedWeight(weight)
    stride, in_features, out_features, dtype, scales = described
    scales = None if scales is None else fetch(scales)
    matrix = PackedMatrix(weight.data_ptr(), stride, in_features, out_features, _DTYPES[dtype], scales)
    return PackedWeight(weight, Layout.PACKED, matrix)


def _codes_record(weight: PackedCodes, store: Store) -> Record:
    own = weight.matrix
    tensors = [None if each is None else store(each) for each in (own.words, own.scales, own.zeros)]
    return [
        "codes",
        *tensors,
        [own.zero, str(own.dtype), own.in_features, own.out_features, str(weight.dtype)],
    ]


def _codes(record: Record, fetch: Fetch) -> PackedCodes:
    _, words, scales, zeros, (zero, dtype, in_features, out_features, of_tokens) = record
    matrix = PackedQuantized(
        fetch(words),
        fetch(scales),
        None if zeros is None else fetch(zeros),
        zero,
        _DTYPES[dtype],
        in_features,
        out_features,
    )
    return PackedCodes(matrix, _DTYPES[of_tokens])


_ENCODERS: dict[type, Callable[[Any, Store], Record]] = {
    PackedWeight: _packed_record,
    PackedCodes: _codes_record,
    PlainWeight: lambda weight, store: ["plain", to_record(weight.packed, store)],
    StackedWeight: lambda weight, store: ["stacked", *(to_record(each, store) for each in weight.weights)],
}
_DECODERS: dict[str, Callable[[Record, Fetch], Weight]] = {
    "tensor": lambda record, fetch: fetch(record),
    "packed": _packed,
    "codes": _codes,
    "plain": lambda record, fetch: PlainWeight(from_record(record[1], fetch)),
    "stacked": lambda record, fetch: StackedWeight(tuple(from_record(each, fetch) for each in record[1:])),
}
