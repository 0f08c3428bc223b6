"""The layers of a decoder over a step of decoding rows alone, on a CPU that does not wait for Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.decode_layers import DecodeLayers, DenseLayer, prefers_native_linear
from ..attention import AttentionInputs, LayerCache
from ..comm.communicator import Communicator


class FusedDecode:
    """What a Decoder's layers and its last norm compute, in one call; where ranks must sum, in two a layer.

    Args:
        layers: what `plan_fused_decode` has found fit for it.
        last_norm: [E].
    """

    def __init__(self, layers: Sequence[DenseLayer], last_norm: Tensor, comm: Communicator) -> None:
        self._layers = DecodeLayers(layers, last_norm)
        self._comm = comm
        self._caches: list[LayerCache] | None = None

    def takes(self, num_tokens: int, inputs: AttentionInputs) -> bool:
        """Whether it computes this step: one of decoding rows, and not too many of them."""
        return inputs.num_decodes == num_tokens and prefers_native_linear(num_tokens)

    def forward(
        self,
        hidden: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
    ) -> Tensor:
        """Hidden states after the last norm, [T, E].

        Args:
            hidden: [T, E], the embedded tokens; of no use afterwards.
            rotations: cosines and sines of the tokens, as the layers number them.
        """
        if self._caches is not kv_caches:
            self._layers.bind([(cache.blocks, cache.scales) for cache in kv_caches])
            self._caches = kv_caches
        x = torch.empty_like(hidden)
        step = rotations, inputs.slot_mapping, inputs.block_tables, inputs.seq_lens
        halves = range(self._layers.num_sublayers)
        if self._comm.size > 1:
            for half in halves[:-1]:
                self._layers.run(halves[half : half + 1], x, hidden, *step)
                x = self._comm.all_reduce(x)
            halves = halves[-1:]
        self._layers.run(halves, x, hidden, *step)
        return x


def plan_fused_decode(
    layers: Sequence[DenseLayer | None], last_norm: Tensor, comm: Communicator
) -> FusedDecode | None:
    """None where a layer is not dense, or lacks ops of our own."""
    dense = [layer for layer in layers if layer is not None and layer.has_native_ops]
    return FusedDecode(dense, last_norm, comm) if len(dense) == len(layers) else None
