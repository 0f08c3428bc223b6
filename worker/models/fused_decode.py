"""FusedDecode: all layers of a decode step in one native call, which saves a CPU the time of Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ...kernels.decode_layers import DecodeLayers, DenseLayer
from ...kernels.lora import LoraGroups
from ..attention import AttentionInputs, LayerCache
from ..comm.communicator import Communicator
from .aux_states import AuxStates

# (output of attention, residual) -> output of the feed-forward network, as DecoderLayer.forward_mixture
Mixture = Callable[[Tensor, Tensor], Tensor]

_log = logging.getLogger(__name__)


class FusedDecode:
    """A Decoder's layers and its last norm in one native call; with several ranks, in two calls per layer.

    With several cache groups there is a call for each run of layers of one group, and mixtures of experts are
    computed between two calls.

    Args:
        layers: none has a missing_op; see plan_fused_decode.
        mixtures: feed-forward network of each layer that has none in `layers`; None for the others.
        last_norm: [E].
    """

    def __init__(
        self,
        layers: Sequence[DenseLayer],
        mixtures: Sequence[Mixture | None],
        last_norm: Tensor,
        comm: Communicator,
    ) -> None:
        self._layers = DecodeLayers(layers, last_norm)
        # sublayer |-> mixture of experts
        self._mixtures = {
            2 * index + 1: mixture for index, mixture in enumerate(mixtures) if mixture is not None
        }
        self._comm = comm
        self._caches: list[LayerCache] | None = None
        self._pieces: list[tuple[int, int, int]] = []  # first sublayer, end, and cache group of each call

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
            self._pieces = self._divide([cache.group for cache in kv_caches])
        x = torch.empty_like(hidden)
        features = None if aux is None else aux.allocate(hidden)
        aux_layers = frozenset[int]() if aux is None else aux.layers
        for start, end, group in self._pieces:
            if start in self._mixtures:
                x = self._mixtures[start](x, hidden)
                continue
            own = inputs.of_group(group)
            step = rotations, own.slot_mapping, own.block_tables, own.seq_lens
            self._layers.run(range(start, end), x, hidden, *step, features, aux_layers)
            if self._comm.size > 1 and end < self._layers.num_sublayers:
                x = self._comm.all_reduce(x)
        return x

    def _divide(self, groups: list[int]) -> list[tuple[int, int, int]]:
        """Divide the sublayers into calls.

        Args:
            groups: cache group of each layer.
        """
        num_sublayers = self._layers.num_sublayers
        if self._comm.size > 1:  # ranks sum after each sublayer but the last norm
            stops = list(range(1, num_sublayers))
        else:
            changes = zip(groups, groups[1:], range(2, num_sublayers, 2), strict=False)
            changed = [start for before, after, start in changes if before != after]
            around = [stop for sublayer in self._mixtures for stop in (sublayer, sublayer + 1)]
            stops = sorted({*changed, *around})
        bounds = pairwise([0, *stops, num_sublayers])
        return [(start, end, groups[min(start // 2, len(groups) - 1)]) for start, end in bounds]


def plan_fused_decode(
    layers: Sequence[DenseLayer | None],
    mixtures: Sequence[Mixture | None],
    last_norm: Tensor,
    comm: Communicator,
) -> FusedDecode | None:
    """Return a FusedDecode. Returns None, and logs why, if a layer has no native ops.

    Args:
        mixtures: as for FusedDecode.
    """
    dense = [layer for layer in layers if layer is not None]
    missing = [reason for reason in (layer.missing_op() for layer in dense) if reason is not None]
    if len(dense) < len(layers):
        missing.append("a layer is of a kind without fused ops")
    if missing:
        log_op_by_op(last_norm.device, missing[0])
        return None
    return FusedDecode(dense, mixtures, last_norm, comm)


def log_op_by_op(device: torch.device, reason: str) -> None:
    """Log why a model has no FusedDecode; does nothing on a GPU, whose steps are recorded instead."""
    if device.type == "cpu":
        _log.info("decode steps run op by op, which is slower with few sequences: %s", reason)
