"""Modules that replace those of a transformers model: parallel layers, and a body with precomputed states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class ParallelModule(nn.Module):
    """A layer of quire as a module, whose input has batch dimensions.

    Args:
        forward: of the layer; token ids [T] or hidden states [T, E] -> [T, N].
        weight: of the replaced module, on the meta device: some models ask for its dtype.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], weight: Tensor | None = None) -> None:
        super().__init__()
        self._forward = forward
        self.weight = None if weight is None else weight.detach()  # no parameter, which would be loaded

    def forward(self, x: Tensor) -> Tensor:
        """[...] token ids, or [..., E] -> [..., N]."""
        batch, features = (x.shape[:-1], x.shape[-1:]) if x.is_floating_point() else (x.shape, ())
        y = self._forward(x.reshape(-1, *features))
        return y.view(*batch, y.shape[-1])


class PrecomputedBody(nn.Module):
    """Replaces a model's body: returns the embeddings of its input as hidden states, so that only the head runs."""

    @property
    def decoder(self) -> PrecomputedBody:
        """The part of the body that OPT's causal model calls."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)


class _BodyOutput:
    """Output of a body with hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
