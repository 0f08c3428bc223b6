"""What PyTorch has for the work of the small ops, as it stands and for torch.compile."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_by_torch(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return torch.rms_norm(residual.add_(x), weight.shape, weight, 1e-5)


def swiglu_by_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu_by_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
