"""HyperConnection: a part of a layer whose residual has several streams (Zhu et al., *Hyper-Connections*, 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...proto.model.spec import DecoderSpec
from ...proto.model.streams import Streams
from .load_context import LoadContext


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the streams of each token, float32.

    Attributes:
        before: [T, N], of the streams in the input of a part.
        after: [T, N], of its result in the streams.
        mixing: [T, N, N], of the streams in each other; None if they stay as they are.
    """

    before: Tensor
    after: Tensor
    mixing: Tensor | None


def _read(load: LoadContext, name: str, *shape: int) -> Tensor:
    """Read a parameter in float32, as checkpoints store it."""
    out = torch.empty(shape, dtype=torch.float32, device=load.device)
    load.checkpoint.read_into(out, name, shape)
    return out


class HyperConnection:
    """Weights of the streams, which follow from the streams themselves; every rank computes them.

    Args:
        name: of the connection in the checkpoint.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: Streams, name: str) -> None:
        self._own, self._eps = own, spec.norm_eps
        num_weights = (2 + own.count) * own.count if own.mixes else 2 * own.count
        self._matrix = _read(load, f"{name}.fn", num_weights, own.count * spec.hidden_size)
        self._base = _read(load, f"{name}.base", num_weights)
        self._scale = _read(load, f"{name}.scale", 3 if own.mixes else 2)

    def weigh(self, streams: Tensor) -> Weights:
        """Return the weights for a part of the layer, of streams [T, N, E]."""
        own, count = self._own, self._own.count
        projected = project_streams(streams, self._matrix, self._eps)
        before = (projected[:, :count] * self._scale[0] + self._base[:count]).sigmoid() + own.eps
        after = (projected[:, count : 2 * count] * self._scale[1] + self._base[count : 2 * count]).sigmoid()
        after = own.magnitude * after
        if not own.mixes:
            return Weights(before, after + own.eps, None)
        mixing = projected[:, 2 * count :] * self._scale[2] + self._base[2 * count :]
        mixing = mixing.unflatten(1, (count, count)).softmax(dim=-1) + own.eps
        mixing = mixing / (mixing.sum(dim=1, keepdim=True) + own.eps)
        for _ in range(own.num_iterations - 1):
            mixing = mixing / (mixing.sum(dim=2, keepdim=True) + own.eps)
            mixing = mixing / (mixing.sum(dim=1, keepdim=True) + own.eps)
        return Weights(before, after, mixing)


class HyperHead:
    """The sum of the streams before the last norm."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: Streams, name: str) -> None:
        self._own, self._eps = own, spec.norm_eps
        self._matrix = _read(load, f"{name}.hc_fn", own.count, own.count * spec.hidden_size)
        self._base = _read(load, f"{name}.hc_base", own.count)
        self._scale = _read(load, f"{name}.hc_scale", 1)

    def forward(self, streams: Tensor) -> Tensor:
        """[T, N, E] -> [T, E]."""
        projected = project_streams(streams, self._matrix, self._eps)
        return collapse(streams, (projected * self._scale + self._base).sigmoid() + self._own.eps)


def project_streams(streams: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """Return the projection of each token's streams, normalized together: [T, N, E] -> [T, W] float32."""
    flat = streams.flatten(1).float()
    return F.linear(flat, matrix) * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + eps)


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the streams, [T, N, E] -> [T, E]."""
    return (weights.unsqueeze(-1) * streams).sum(dim=1).to(streams.dtype)


def expand(streams: Tensor, result: Tensor, weights: Weights) -> Tensor:
    """Return the streams after a part of a layer.

    Args:
        streams: [T, N, E], before it.
        result: [T, E], of the part.
    """
    added = weights.after.unsqueeze(-1) * result.unsqueeze(1).float()
    wide = streams.float()
    if weights.mixing is not None:
        # Addend by addend: the sums of a batched product on a CPU depend on the number of tokens.
        mixed = torch.zeros_like(wide)
        for index in range(wide.shape[1]):
            mixed += weights.mixing[:, index, :, None] * wide[:, None, index]
        wide = mixed
    return (wide + added).to(streams.dtype)
