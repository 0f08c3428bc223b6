"""Variants of causal softmax attention: sliding window, chunks, soft cap, ALiBi and sinks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionVariant:
    """Changes to the scores of attention, applied in the order: scale, soft cap, linear bias, hidden keys.

    Attributes:
        window: a query attends to the last `window` tokens, its own included; 0: to all.
        soft_cap: scores become ``cap * tanh(score / cap)`` (Gemma 2, 2024); 0: no cap.
        alibi_slopes: [Hq] float32; adds ``slope * (key position - query position)`` (Press et al., *Train Short,
            Test Long*, 2022); None: no bias.
        sinks: [Hq] float32, the score of one more key per head, whose value is 0 (gpt-oss, 2025): the weights of the
            sequence's keys sum to less than 1; None: no such key.
        chunk: a query attends to the keys from the last multiple of `chunk` on, its own included (Llama 4, 2025);
            0: to all.
    """

    window: int = 0
    soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    chunk: int = 0


PLAIN = AttentionVariant()
