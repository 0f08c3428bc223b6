"""Attention variants that every implementation is tested with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.attention_variant import PLAIN, AttentionVariant


def _sinks(num_heads: int, device: str) -> torch.Tensor:
    return torch.linspace(-3.0, 8.0, num_heads, device=device)


def _slopes(num_heads: int, device: str) -> torch.Tensor:
    return torch.linspace(0.5, 0.01, num_heads, device=device)


def first_visible(variant: AttentionVariant, position: int) -> int:
    """Return the first position that the query of a position attends to."""
    by_window = max(0, position + 1 - variant.window) if variant.window else 0
    return max(by_window, position // variant.chunk * variant.chunk) if variant.chunk else by_window


# name |-> (query heads, device) -> variant
VARIANTS: dict[str, Callable[[int, str], AttentionVariant]] = {
    "plain": lambda num_heads, device: PLAIN,
    "window": lambda num_heads, device: AttentionVariant(window=20),
    "window of one": lambda num_heads, device: AttentionVariant(window=1),
    "chunk": lambda num_heads, device: AttentionVariant(chunk=20),
    "chunk and window": lambda num_heads, device: AttentionVariant(window=33, chunk=48),
    "soft cap": lambda num_heads, device: AttentionVariant(soft_cap=3.0),
    "alibi": lambda num_heads, device: AttentionVariant(alibi_slopes=_slopes(num_heads, device)),
    "sinks": lambda num_heads, device: AttentionVariant(sinks=_sinks(num_heads, device)),
    "all": lambda num_heads, device: AttentionVariant(
        33, 3.0, _slopes(num_heads, device), _sinks(num_heads, device)
    ),
}
