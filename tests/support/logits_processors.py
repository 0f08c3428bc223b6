"""Moves the logits processors of a batch to a device."""

from __future__ import annotations

from quire.kernels.logits import Biases, LogitsProcessors, Masks, Penalties


def to_device(processors: LogitsProcessors, device: str) -> LogitsProcessors:
    num_tokens, biases, penalties, masks = processors
    return LogitsProcessors(
        num_tokens,
        Biases(*(tensor.to(device) for tensor in biases)),
        Penalties(*(tensor.to(device) for tensor in penalties)),
        Masks(*(tensor.to(device) for tensor in masks)),
    )
