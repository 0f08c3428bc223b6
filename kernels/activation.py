"""Activations of gated linear units (Shazeer, *GLU Variants Improve Transformer*, 2020)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import on_gpu
from .native import ops as cpu


@on_gpu("activation")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return SwiGLU, ``silu(gate) * up``, of the two halves of the last dimension: [T, 2 I] -> [T, I]."""
    if _has_cpu_op(gate_up):
        return cpu.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@on_gpu("activation")
def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return GEGLU, ``gelu(gate) * up``, with GELU's tanh approximation (Hendrycks and Gimpel, 2016)."""
    if _has_cpu_op(gate_up):
        return cpu.gelu_tanh_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@on_gpu("activation")
def clamped_silu_and_mul(gate_up: Tensor, alpha: float, limit: float, offset: float = 1.0) -> Tensor:
    """Return ``gate * sigmoid(alpha * gate) * (up + offset)`` of clamped halves: [T, 2 I] -> [T, I].

    gpt-oss (2025) has the offset 1, DeepSeek-V4 (2026) the offset 0.

    Args:
        limit: the gate is at most this, the other half between its negative and this.
    """
    if _has_cpu_op(gate_up):
        return cpu.clamped_silu_and_mul(gate_up, alpha, limit, offset)
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (gate * alpha).sigmoid() * (up + offset)


def sigmoid(x: Tensor) -> Tensor:
    """Return the logistic function of each number.

    On a CPU the result of a number depends on nothing else, here and in `tanh`, `silu` and `gelu_tanh`: PyTorch
    computes the last numbers of a tensor otherwise than those before.
    """
    return cpu.activate(x, "sigmoid") if _has_cpu_op(x) else torch.sigmoid(x)


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of each number."""
    return cpu.activate(x, "tanh") if _has_cpu_op(x) else torch.tanh(x)


def silu(x: Tensor) -> Tensor:
    """Return ``x * sigmoid(x)`` of each number."""
    return cpu.activate(x, "silu") if _has_cpu_op(x) else F.silu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU with its tanh approximation of each number."""
    return cpu.activate(x, "gelu_tanh") if _has_cpu_op(x) else F.gelu(x, approximate="tanh")


def _has_cpu_op(x: Tensor) -> bool:
    return x.is_contiguous() and cpu.supports(x)


GATED_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}


# Of networks without gates.
UNGATED_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "relu_squared": lambda x: F.relu(x).square_(),
}


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """An activation of GATED_ACTIVATIONS, or the clamped one, or ``relu_squared``, which is not gated.

    Attributes:
        gate: a key of GATED_ACTIVATIONS, or ``relu_squared``.
        clamp: alpha, limit and offset of `clamped_silu_and_mul`, which takes the place of the gate; None for the
            gate's own.
        limit: the activated gate is at most this, the other half between its negative and this; 0 for none.
    """

    gate: str
    clamp: tuple[float, float, float] | None = None
    limit: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I], or [T, I] -> [T, I] without gates."""
        if self.limit:
            gate, up = gate_up.chunk(2, dim=-1)
            activated = UNGATED_ACTIVATIONS[self.gate](gate.contiguous())
            return activated.clamp_(max=self.limit).mul_(up.clamp(-self.limit, self.limit))
        if self.clamp is None:
            return (GATED_ACTIVATIONS.get(self.gate) or UNGATED_ACTIVATIONS[self.gate])(gate_up)
        return clamped_silu_and_mul(gate_up, *self.clamp)
