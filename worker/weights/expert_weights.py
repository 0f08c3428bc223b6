"""The weights of all experts of a layer as one tensor, for kernels.moe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.linear import Layout
from ...kernels.moe import ExpertWeights
from ...kernels.quantized_linear import QuantizedWeight
from .linear_weight import Float8Weight, LinearWeight, PlainWeight, QuantizedLinearWeight


def stack_experts(weights: Sequence[LinearWeight], bias: Tensor | None) -> ExpertWeights | None:
    """Stack the weights of one linear layer of all experts; they may be freed afterwards.

    Float8 weights are converted as they are read: their tokens stay in the model's dtype.

    Args:
        bias: of all experts, [X, N], or None.

    Returns:
        None if the experts are stored in different formats.
    """
    plain = [
        weight.packed.weight
        for weight in weights
        if isinstance(weight, PlainWeight) and weight.packed.layout is Layout.PLAIN
    ]
    if len(plain) == len(weights):
        return ExpertWeights(torch.stack(plain), bias=bias)
    quantized = [
        weight.quantized for weight in weights if isinstance(weight, QuantizedLinearWeight | Float8Weight)
    ]
    if len(quantized) < len(weights) or len({_format_of(weight) for weight in quantized}) > 1:
        return None
    return ExpertWeights(
        torch.stack([weight.codes for weight in quantized]),
        torch.stack([weight.scales for weight in quantized]),
        _stack_present([weight.zeros for weight in quantized]),
        _stack_present([weight.group_index for weight in quantized]),
        bias,
    )


def _format_of(weight: QuantizedWeight) -> tuple[object, ...]:
    tensors = weight.codes, weight.scales, weight.zeros, weight.group_index
    return tuple(None if each is None else (each.dtype, each.shape) for each in tensors)


def _stack_present(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Stack tensors of which either all are there or none."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None
