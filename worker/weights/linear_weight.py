"""LinearWeight: the weight of a linear layer, read from a rank's slices of the checkpoint's matrices."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.linear import PackedWeight, gated_linear, linear, pack, pack_int8
from ...kernels.packed_quantized import PackedQuantized, dequantize_packed, pack_quantized
from ...kernels.quantized_linear import (
    FLOAT8,
    Float8Tokens,
    QuantizedWeight,
    dequantize,
    float8_groups_linear,
    float8_linear,
    has_quantized_kernel,
    quantize,
    quantized_linear,
    supports_float8_groups,
    supports_float8_linear,
)
from ...proto.model.quantization import Quantization
from .checkpoint import Checkpoint
from .quantized_layouts import read_quantized
from .weight_slice import WeightSlice

ONLINE_TYPES = {"int8": torch.int8, "fp8": FLOAT8}
# Dtypes that C++ ops dequantize panels to.
PACKED_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements of a matrix that are in float32 at a time while it is quantized or dequantized.
CHUNK_ELEMENTS = 1 << 24


class LinearWeight(Protocol):
    """A matrix [N, K] in a layout for the device."""

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ matrix.T + bias``: [T, K] -> [T, N]."""
        ...


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight packed by kernels.linear: in the model's dtype, or in int8 for CPUs that compute in int8."""

    packed: PackedWeight

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, self.packed, bias)

    def multiply_gated(self, x: Tensor, gate: str, bias: Tensor | None = None) -> Tensor:
        """Return the gated activation of ``x @ matrix.T + bias``: [T, K] -> [T, N / 2]."""
        return gated_linear(x, self.packed, gate, bias)


def packed_weight(weight: LinearWeight) -> PackedWeight | None:
    """Return the packed matrix of a PlainWeight. Returns None for other weights."""
    return weight.packed if isinstance(weight, PlainWeight) else None


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A quantized weight of a CPU that keeps its bits: for ops that dequantize panel by panel (PackedExperts).

    Attributes:
        dtype: of the tokens.
    """

    matrix: PackedQuantized
    dtype: torch.dtype

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As LinearWeight; dequantizes the whole weight in each call."""
        return linear(x, dequantize_packed(self.matrix, self.dtype), bias)


def without_codes(weight: LinearWeight) -> LinearWeight:
    """Return a PlainWeight instead of PackedCodes, and other weights unchanged."""
    if not isinstance(weight, PackedCodes):
        return weight
    return PlainWeight(dequantize_packed(weight.matrix, weight.dtype))


def any_packed_weight(weight: LinearWeight) -> PackedWeight | PackedQuantized | None:
    """Return the matrix of a PlainWeight or PackedCodes. Returns None for other weights."""
    return weight.matrix if isinstance(weight, PackedCodes) else packed_weight(weight)


@dataclass(frozen=True, slots=True)
class QuantizedLinearWeight:
    """A quantized weight whose kernel dequantizes while reading (weight-only quantization)."""

    quantized: QuantizedWeight

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return quantized_linear(x, self.quantized, bias)


@dataclass(frozen=True, slots=True)
class Float8GroupsWeight(QuantizedLinearWeight):
    """A float8 weight with a scale per 128 inputs; the activations are quantized to float8 in the same way."""

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return float8_groups_linear(x, self.quantized, bias)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A float8 weight that is multiplied in float8; the activations are quantized to float8 as well."""

    quantized: QuantizedWeight

    def multiply(self, x: Tensor | Float8Tokens, bias: Tensor | None = None) -> Tensor:
        return float8_linear(x, self.quantized, bias)


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Concatenated matrices with different quantization."""

    weights: tuple[LinearWeight, ...]

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.cat([weight.multiply(x) for weight in self.weights], dim=1)
        return y if bias is None else y.add_(bias)


def read_linear(
    checkpoint: Checkpoint,
    parts: Sequence[WeightSlice],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    *,
    keep_codes: bool = False,
) -> LinearWeight:
    """Read a layer's matrix.

    Args:
        parts: slices whose rows are concatenated, in this order.
        quantization: of the checkpoint or online; None for full precision. Layers of a quantized checkpoint may be
            stored in full precision.
        keep_codes: return quantized weights as PackedCodes where a CPU has ops for them.

    Raises:
        ModelLoadError: a tensor is missing or has another shape.
        ConfigError: a slice begins or ends inside a word that packs several elements.
    """
    if quantization is None:
        return _read_plain(checkpoint, parts, dtype, device)
    if quantization.is_online:
        online = ONLINE_TYPES[quantization.method]
        quantized = [_quantize_slice(checkpoint, part, online, device) for part in parts]
        return make_linear_weight(_merge(quantized)[0], dtype, keep_codes=keep_codes)
    return _read_stored(checkpoint, parts, dtype, device, quantization, keep_codes=keep_codes)


def read_matrix(
    checkpoint: Checkpoint,
    part: WeightSlice,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
) -> Tensor:
    """Read a slice of a matrix, [N, K], that is multiplied by other means than a linear layer.

    A quantized checkpoint's is dequantized, and online quantization does not apply; the arguments and errors are
    those of read_linear.
    """
    stored = None
    if quantization is not None and not quantization.is_online:
        stored = read_quantized(checkpoint, part, quantization, device)
    if stored is not None:
        return dequantize(stored).to(dtype)
    out = torch.empty(part.outputs[1], part.inputs[1], dtype=dtype, device=device)
    checkpoint.read_into(out, f"{part.name}.weight", part.shape, part.dim, part.start)
    return out


def make_linear_weight(
    weight: QuantizedWeight, dtype: torch.dtype, *, keep_codes: bool = False
) -> LinearWeight:
    """Return the fastest form for the weight's device; dequantize the weight if the device has no kernel for it.

    `keep_codes` is as for read_linear.
    """
    if supports_float8_linear(weight):
        return Float8Weight(weight)
    if supports_float8_groups(weight) and dtype.itemsize == 2:
        return Float8GroupsWeight(weight)
    if has_quantized_kernel(weight):
        return QuantizedLinearWeight(weight)
    if weight.codes.dtype == torch.int8 and weight.is_per_output:
        packed = pack_int8(weight.codes, weight.scales[0])
        if packed is not None:
            return PlainWeight(packed)
    if keep_codes and dtype in PACKED_TYPES:
        codes = pack_quantized(weight)
        if codes is not None:
            return PackedCodes(codes, dtype)
    matrix = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.codes.device)
    step = max(1, CHUNK_ELEMENTS // weight.in_features)
    for start in range(0, weight.out_features, step):
        matrix[start : start + step] = dequantize(weight.rows(start, start + step))
    return PlainWeight(pack(matrix))


def _read_stored(
    checkpoint: Checkpoint,
    parts: Sequence[WeightSlice],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization,
    *,
    keep_codes: bool,
) -> LinearWeight:
    """Read slices of a quantized checkpoint, which may store some of them in full precision."""
    read = [read_quantized(checkpoint, part, quantization, device) for part in parts]
    stored = [weight for weight in read if weight is not None]
    if not stored:
        return _read_plain(checkpoint, parts, dtype, device)
    if len(stored) == len(parts):
        merged = _merge(stored)
        # Ops multiply whole layers by codes.
        keep_codes = keep_codes and len(merged) == 1
        weights = [make_linear_weight(weight, dtype, keep_codes=keep_codes) for weight in merged]
    else:
        weights = [
            _read_plain(checkpoint, [part], dtype, device)
            if weight is None
            else make_linear_weight(weight, dtype)
            for part, weight in zip(parts, read, strict=True)
        ]
    return weights[0] if len(weights) == 1 else StackedWeight(tuple(weights))


def _read_plain(
    checkpoint: Checkpoint, parts: Sequence[WeightSlice], dtype: torch.dtype, device: torch.device
) -> PlainWeight:
    num_outputs = [part.outputs[1] for part in parts]
    weight = empty_scratch((sum(num_outputs), parts[0].inputs[1]), dtype, device)
    for out, part in zip(weight.split_with_sizes(num_outputs), parts, strict=True):
        checkpoint.read_into(out, f"{part.name}.weight", part.shape, part.dim, part.start)
        if part.interleaving is not None:
            out.copy_(part.interleaving.reorder(out))
    return PlainWeight(pack(weight))


def _quantize_slice(
    checkpoint: Checkpoint, part: WeightSlice, dtype: torch.dtype, device: torch.device
) -> QuantizedWeight:
    """Quantize a slice with the scales of the whole matrix, so that results do not depend on the number of ranks."""
    first_output, num_outputs = part.outputs
    first_input, num_inputs = part.inputs
    codes = torch.empty(num_outputs, num_inputs, dtype=dtype, device=device)
    scales = torch.empty(1, num_outputs, dtype=torch.float32, device=device)
    step = max(1, CHUNK_ELEMENTS // part.shape[1])
    for start in range(0, num_outputs, step):
        rows = first_output + start, min(step, num_outputs - start)
        whole = checkpoint.read(f"{part.name}.weight", part.shape, rows, device=device)
        chunk = quantize(whole[:, first_input : first_input + num_inputs], dtype, whole.abs().amax(dim=1))
        codes[start : start + step] = chunk.codes
        scales[:, start : start + step] = chunk.scales
    weight = QuantizedWeight(codes, scales)
    return weight if part.interleaving is None else weight.reordered(part.interleaving.order(num_outputs))


def _merge(weights: list[QuantizedWeight]) -> list[QuantizedWeight]:
    """Concatenate weights to one if their quantization is the same; return them unchanged otherwise."""
    first = weights[0]
    if not all(_same_format(first, weight) for weight in weights[1:]):
        return weights
    zeros = None
    if first.zeros is not None:
        zeros = torch.cat([weight.zeros for weight in weights if weight.zeros is not None], dim=1)
    codes = torch.cat([weight.codes for weight in weights])
    scales = torch.cat([weight.scales for weight in weights], dim=1)
    return [QuantizedWeight(codes, scales, zeros, first.group_index)]


def _same_format(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    if one.group_index is None or other.group_index is None:
        same_groups = one.group_index is other.group_index
    else:
        same_groups = torch.equal(one.group_index, other.group_index)
    return (
        same_groups
        and one.codes.dtype == other.codes.dtype
        and one.scales.shape[0] == other.scales.shape[0]
        and one.scales.dtype == other.scales.dtype
        and (one.zeros is None) == (other.zeros is None)
    )


def empty_scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor for temporary data.

    On a CPU it bypasses the allocator: after the weights have been packed, the freed originals would leave holes in
    the heap that add up to a tenth of the model.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
