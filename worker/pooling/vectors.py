"""Vectors of pooled prompts as tensors, for callers in Python."""

from __future__ import annotations

import torch

from ...proto.codec import FloatArray


def as_tensor(values: FloatArray) -> torch.Tensor:
    """Return a copy of a vector, [dimensions or classes] float32."""
    return torch.tensor(values)
