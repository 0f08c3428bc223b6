"""FeatureTap: takes the hidden states that a draft head reads from the target model's forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import AttentionInputs, LayerCache
from ..models.aux_states import AuxStates
from ..models.loader import Model
from ..step.batch import Batch


class FeatureTap:
    """Runs the model, and keeps the hidden states of one step.

    Args:
        layers: as DraftHead.aux_layers.
        max_graph_tokens: tokens of the largest recorded step.

    Attributes:
        is_open: keep the hidden states of the following steps. Recorded steps always keep them.
    """

    def __init__(self, model: Model, layers: frozenset[int], max_graph_tokens: int) -> None:
        self.is_open = True
        self._model, self._layers = model, layers
        self._max_graph_tokens = max_graph_tokens
        self._features: Tensor | None = None
        self._buffer: Tensor | None = None  # of all graphs

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[LayerCache], inputs: AttentionInputs
    ) -> Tensor:
        """Return the hidden states after the last norm, [T, E], as Model.forward does; only if the tap is open."""
        aux = AuxStates(self._layers) if self._layers else None
        hidden = self._model.forward(token_ids, positions, kv_caches, inputs, aux)
        self._features = hidden if aux is None else aux.join()
        return hidden

    def record(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[LayerCache], inputs: AttentionInputs
    ) -> Tensor:
        """Run a step that is being recorded as `forward` does; its replays write the hidden states to a buffer."""
        self.is_open = True
        hidden = self.forward(token_ids, positions, kv_caches, inputs)
        assert self._features is not None
        if self._buffer is None:
            self._buffer = self._features.new_empty(self._max_graph_tokens, self._features.shape[1])
        self._buffer[: len(self._features)].copy_(self._features)
        return hidden

    def take(self, batch: Batch, num_replayed_decodes: int | None) -> Tensor:
        """Return the hidden states of the step's tokens, [T, F]; only if the tap is open.

        Args:
            num_replayed_decodes: decodes of the graph that computed the step, with padding; None if it was not
                replayed.
        """
        if num_replayed_decodes is None:
            assert self._features is not None
            return self._features
        assert self._buffer is not None
        num_decodes = batch.num_decodes
        num_others = len(batch.token_ids) - num_decodes
        first = num_replayed_decodes
        parts = self._buffer[:num_decodes], self._buffer[first : first + num_others]
        return torch.cat(parts)
