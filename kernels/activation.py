"""SwiGLU's gate (Shazeer, 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from . import cpu
from .dispatch import on_gpu


@on_gpu("activation")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for the two halves of the last dimension: [T, 2 I] -> [T, I]."""
    if gate_up.is_contiguous() and cpu.takes(gate_up, gate_up.shape[1] // 2):
        return cpu.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
