"""AttentionVariant: how a layer's attention departs from the plain softmax over everything before a token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionVariant:
    """In the order in which a score is made: scaled product, soft cap, linear bias, window.

    Attributes:
        window: a query sees the last `window` tokens, itself included; 0: all.
        soft_cap: scaled products become ``cap * tanh(product / cap)`` (Gemma 2, 2024); 0: they stay as they are.
        alibi_slopes: [Hq] float32; adds ``slope * (key position - query position)`` (Press et al., *Train Short,
            Test Long*, 2022); None: nothing.
    """

    window: int = 0
    soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None


PLAIN = AttentionVariant()
