"""Streams: a residual of several streams, which hyper-connections mix (Zhu et al., *Hyper-Connections*, 2024)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a decoder's residual.

    Attributes:
        count: number of streams.
        eps: added to the weights of the streams.
        magnitude: largest weight that a stream gets the result of a part of a layer with.
        num_iterations: of Sinkhorn and Knopp, after which the matrix that mixes the streams is nearly doubly
            stochastic.
        mixes: the streams are mixed after each part of a layer (Xie et al., *Manifold-Constrained Hyper-Connections*,
            2026); otherwise each of them stays as it is.
        averages: the last norm reads the mean of the streams; otherwise a sum with weights that follow from them.
    """

    count: int
    eps: float
    magnitude: float
    num_iterations: int = 0
    mixes: bool = False
    averages: bool = False


@dataclass(frozen=True, slots=True)
class GatedStreams:
    """Streams that stay as they are; each part of a layer reads the mean of their gated numbers (Qwen4, 2026).

    Attributes:
        count: number of streams.
        rank: inner numbers of the network that computes the gates from all streams.
    """

    count: int
    rank: int
