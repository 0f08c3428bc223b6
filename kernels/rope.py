"""Rotary position embedding (Su et al., 2021) in the half-split layout of the Llama family."""

from __future__ import annotations

from torch import Tensor

from . import cpu


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates every head in place: element i pairs with element i + D/2.

    Args:
        x: [T, H, D], queries, keys or both beside each other.
        cos: [T, D], the angle of pair i at both i and i + D/2.
        sin: [T, D], likewise, negative in the first half.
    """
    if x.stride(1) == x.shape[2] and cpu.takes(x, x.shape[2] // 2):
        cpu.apply_rope(x, cos, sin)
        return
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))
