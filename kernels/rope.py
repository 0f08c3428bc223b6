"""Rotary position embedding (Su et al., 2021) in the half-split layout of the Llama family."""

from __future__ import annotations

from torch import Tensor

from .native import ops as cpu


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first R numbers of every head in place: element i pairs with element i + R/2.

    Args:
        x: [T, H, D], queries, keys, or both concatenated.
        cos: [T, R], R even and at most D; the angle of pair i stands at i and i + R/2.
        sin: [T, R], as cos, and negated in the first half.
    """
    rotated_dim = cos.shape[1]
    if x.stride(1) == x.shape[2] and cpu.supports(x, x.shape[2]):
        cpu.apply_rope(x, cos, sin)
        return
    rotated = x[..., :rotated_dim]
    swapped = rotated.roll(rotated_dim // 2, dims=-1)
    rotated.mul_(cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))
