"""FusedDecode: all layers of a decode step in one native call, which saves a CPU the time of Python."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.decode_layers import DecodeLayers, DenseLayer
from ...kernels.lora import LoraGroups
from ..attention import AttentionInputs, LayerCache
from ..comm.communicator import Communicator
from .aux_states import AuxStates

_log = logging.getLogger(__name__)


class FusedDecode:
    """A Decoder's layers and its last norm in one native call; with several ranks, in two calls per layer.

    Args:
        layers: none has a missing_op; see plan_fused_decode.
        last_norm: [E].
    """

    def __init__(self, layers: Sequence[DenseLayer], last_norm: Tensor, comm: Communicator) -> None:
        self._layers = DecodeLayers(layers, last_norm)
        self._comm = comm
        self._caches: list[LayerCache] | None = None

    def supports(self, num_tokens: int, inputs: AttentionInputs) -> bool:
        """Return whether all rows of the step decode."""
        return inputs.num_decodes == num_tokens

    def forward(
        self,
        hidden: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
        aux: AuxStates | None = None,
        lora: LoraGroups | None = None,
    ) -> Tensor:
        """Return hidden states after the last norm, [T, E]; add those between layers to `aux`.

        Args:
            hidden: [T, E], the embedded tokens; overwritten.
            rotations: cosines and sines of the tokens, in the order of the layers' `rope` indices.
            lora: the tokens with adapters; None for none.
        """
        self._layers.set_groups(lora)
        if self._caches is not kv_caches:
            self._layers.bind([(cache.blocks, cache.scales) for cache in kv_caches])
            self._caches = kv_caches
        x = torch.empty_like(hidden)
        step = rotations, inputs.slot_mapping, inputs.block_tables, inputs.seq_lens
        features = None if aux is None else aux.allocate(hidden)
        aux_layers = frozenset[int]() if aux is None else aux.layers
        last, start = self._layers.num_sublayers - 1, 0
        # Ranks must sum after each sublayer but the last norm.
        for stop in range(1, last + 1) if self._comm.size > 1 else ():
            self._layers.run(range(start, stop), x, hidden, *step, features, aux_layers)
            x = self._comm.all_reduce(x)
            start = stop
        self._layers.run(range(start, last + 1), x, hidden, *step, features, aux_layers)
        return x


def plan_fused_decode(
    layers: Sequence[DenseLayer | None], last_norm: Tensor, comm: Communicator
) -> FusedDecode | None:
    """Return a FusedDecode. Returns None, and logs why, if a layer is not dense or has no native ops."""
    dense = [layer for layer in layers if layer is not None]
    missing = [reason for reason in (layer.missing_op() for layer in dense) if reason is not None]
    if len(dense) < len(layers):
        missing.append("a layer is of a kind without fused ops")
    if missing:
        if last_norm.is_cpu:
            _log.info("decode steps run op by op, which is slower with few sequences: %s", missing[0])
        return None
    return FusedDecode(dense, last_norm, comm)
