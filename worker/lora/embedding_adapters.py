"""EmbeddingAdapters: the adapters of an embedding.

An embedding is a linear layer with one input per token of the vocabulary, of which one is 1. Its adapter adds
``B @ A[:, token]``. Each rank has the columns of A for its part of the vocabulary and all of B, and the all-reduce of
the embedding adds the parts.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...kernels.lora import LoraFactors, add_lora
from .layers import LoraLayer, LoraLayers

# The C++ op takes rows of whole vectors; this is a multiple of every length.
ROW_MULTIPLE = 64


class EmbeddingAdapters:
    """The adapters of one embedding.

    The op of linear layers multiplies the columns of A by an identity and then by B: R products more per number, but
    no op of its own.

    Args:
        layer: of this rank's part of the vocabulary.
    """

    def __init__(self, model: LoraLayers, layer: LoraLayer) -> None:
        self._model, self._factors = model, layer.factors
        num_slots, _, max_rank, _ = layer.factors.a.shape
        self._num_padding = -max_rank % ROW_MULTIPLE
        a = layer.factors.a.new_zeros(num_slots, 1, max_rank, max_rank + self._num_padding)
        a.diagonal(dim1=2, dim2=3).fill_(1)
        model.num_other_bytes += a.nbytes
        own = layer.factors
        self._expansion = LoraFactors(a, own.b, own.ranks, own.starts, own.bounds)

    def add(self, y: Tensor, token_ids: Tensor) -> None:
        """Add the adapters' outputs for the step's tokens to their embeddings, in place.

        Args:
            y: [T, E].
            token_ids: [T], places in this rank's part of the vocabulary.
        """
        groups, slots = self._model.step.groups, self._model.step.token_slots
        if groups is None or slots is None:
            return
        low = self._factors.a[slots.clamp(min=0).long(), 0, :, token_ids.long()]  # [T, R]
        add_lora(y, F.pad(low, (0, self._num_padding)).contiguous(), self._expansion, groups)
