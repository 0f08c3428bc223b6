"""HyperConnection: a part of a layer whose residual has several streams (Zhu et al., *Hyper-Connections*, 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.activation import sigmoid, silu
from ...kernels.linear import PackedWeight, linear, pack
from ...kernels.norm import rms_norm
from ...proto.model.spec import DecoderSpec
from ...proto.model.streams import GatedStreams, Streams
from ..weights.weight_slice import WeightSlice
from .load_context import LoadContext


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights by which each token's streams change, float32.

    Attributes:
        after: [T, N], of the result of a part of a layer in the streams.
        mixing: [T, N, N], of the streams in each other; None if they stay as they are.
    """

    after: Tensor
    mixing: Tensor | None


class Connection(Protocol):
    """Connection of a part of a layer with the streams."""

    def read(self, streams: Tensor) -> tuple[Tensor, Weights]:
        """Return the input of the part, [T, E], and the weights for its result, of streams [T, N, E]."""
        ...


class Head(Protocol):
    """Reduction of the streams to one, before the last norm."""

    def forward(self, streams: Tensor) -> Tensor:
        """[T, N, E] -> [T, E]."""
        ...


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
        self._matrix = pack(_read(load, f"{name}.fn", num_weights, own.count * spec.hidden_size))
        self._base = _read(load, f"{name}.base", num_weights)
        self._scale = _read(load, f"{name}.scale", 3 if own.mixes else 2)

    def read(self, streams: Tensor) -> tuple[Tensor, Weights]:
        """Return the input of a part of the layer, [T, E], and the weights for its result, of streams [T, N, E]."""
        own, count = self._own, self._own.count
        projected = project_streams(streams, self._matrix, self._eps)
        before = (projected[:, :count] * self._scale[0] + self._base[:count]).sigmoid() + own.eps
        after = (projected[:, count : 2 * count] * self._scale[1] + self._base[count : 2 * count]).sigmoid()
        after = own.magnitude * after
        x = collapse(streams, before)
        if not own.mixes:
            return x, Weights(after + own.eps, None)
        mixing = projected[:, 2 * count :] * self._scale[2] + self._base[2 * count :]
        mixing = mixing.unflatten(1, (count, count)).softmax(dim=-1) + own.eps
        mixing = mixing / (mixing.sum(dim=1, keepdim=True) + own.eps)
        for _ in range(own.num_iterations - 1):
            mixing = mixing / (mixing.sum(dim=2, keepdim=True) + own.eps)
            mixing = mixing / (mixing.sum(dim=1, keepdim=True) + own.eps)
        return x, Weights(after, mixing)


class HyperHead:
    """The sum of the streams before the last norm, with weights that follow from them."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, own: Streams, name: str) -> None:
        self._own, self._eps = own, spec.norm_eps
        self._matrix = pack(_read(load, f"{name}.hc_fn", own.count, own.count * spec.hidden_size))
        self._base = _read(load, f"{name}.hc_base", own.count)
        self._scale = _read(load, f"{name}.hc_scale", 1)

    def forward(self, streams: Tensor) -> Tensor:
        """[T, N, E] -> [T, E]."""
        projected = project_streams(streams, self._matrix, self._eps)
        return collapse(streams, (projected * self._scale + self._base).sigmoid() + self._own.eps)


class MeanHead:
    """The mean of the streams before the last norm."""

    def forward(self, streams: Tensor) -> Tensor:
        """[T, N, E] -> [T, E]."""
        return streams.mean(dim=1)


class GatedResidual:
    """The mean of the gated numbers of all streams, which are normalized; every rank computes it.

    Args:
        name: of the connection in the checkpoint.
        has_result: a part of a layer reads it, whose result is added to the streams.
    """

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, own: GatedStreams, name: str, *, has_result: bool = True
    ) -> None:
        self._count, self._eps = own.count, spec.norm_eps
        size = own.count * spec.hidden_size
        self._norm = load.norm(f"{name}.hc_norm", size, spec.norms.offset).view(own.count, spec.hidden_size)
        self._ones = load.empty(spec.hidden_size).fill_(1)
        self._down, self._up = (
            load.linear([WeightSlice(f"{name}.input_mix_weight_{part}", shape, 0, 0, shape[0])])
            for part, shape in (("down", (own.rank, size)), ("up", (size, own.rank)))
        )
        self._after: PackedWeight | None = None
        if has_result:
            part = WeightSlice(f"{name}.block_inject_weight", (own.count, size), 0, 0, own.count)
            self._after = pack(load.matrix(part))

    def read(self, streams: Tensor) -> tuple[Tensor, Weights]:
        """Return the input of a part of the layer, [T, E], and the weights for its result, of streams [T, N, E]."""
        assert self._after is not None
        normed = self._normalize(streams)
        after = 2 * sigmoid(linear(normed.flatten(1), self._after) / self._count)
        return self._mix(normed), Weights(after.float(), None)

    def forward(self, streams: Tensor) -> Tensor:
        """[T, N, E] -> [T, E]."""
        return self._mix(self._normalize(streams))

    def _normalize(self, streams: Tensor) -> Tensor:
        return rms_norm(streams, self._ones, self._eps) * self._norm

    def _mix(self, normed: Tensor) -> Tensor:
        inner = silu(self._down.multiply(normed.flatten(1)) / self._count)
        gates = sigmoid(self._up.multiply(inner)).view_as(normed)
        return (gates * normed).mean(dim=1)


def project_streams(streams: Tensor, matrix: PackedWeight, eps: float) -> Tensor:
    """Return the projection of each token's streams, normalized together: [T, N, E] -> [T, W] float32."""
    flat = streams.flatten(1).float()
    return linear(flat, matrix) * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + eps)


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
