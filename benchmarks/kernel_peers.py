"""PyTorch implementations of our ops, for comparison eagerly and with torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@functools.cache
def compiled(op: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """Return torch.compile's version of the op. At the first call torch imports its compiler, which takes 1.2 s."""
    return torch.compile(op, **options)


def norm_by_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return torch.rms_norm(residual.add_(x), weight.shape, weight, eps)


def swiglu_by_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu_by_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def rotate_by_torch(
    heads: Tensor, kv_cache: Tensor, slot_mapping: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """See kernels.fused_qk_norm_rope_kv_write."""
    num_kv_heads, block_size = kv_cache.shape[2:4]
    rotated = heads[:, :-num_kv_heads]
    swapped = rotated.roll(cos.shape[1] // 2, dims=-1)
    rotated.mul_(cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))
    kv = heads[:, -2 * num_kv_heads :].unflatten(1, (2, num_kv_heads))
    kv_cache[slot_mapping // block_size, :, :, slot_mapping % block_size] = kv
    return heads[:, : -2 * num_kv_heads]
