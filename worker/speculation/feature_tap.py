"""FeatureTap: hands the hidden states of the target model's forward passes to a draft head."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...proto.step import StepPlan
from ..models.aux_states import AuxStates
from ..step.batch import Batch
from ..step.unsettled_steps import Record

# What a draft head reads of a stage: the inputs of some of its layers, as AuxStates.layers, or with None the hidden
# states after the last norm.
Features = frozenset[int] | None
NO_FEATURES: frozenset[int] = frozenset()


class FeatureReader(Protocol):
    """Gets the hidden states of steps: a draft head, or its stand-in with several pipeline stages.

    Attributes:
        wants_features: keep the hidden states of the next step.
    """

    @property
    def wants_features(self) -> bool: ...

    def drop_states(self) -> None:
        """Forget all hidden states."""
        ...

    def record(self, batch: Batch, features: Tensor) -> Record | None:
        """Keep the hidden states of a step, [T, F].

        Returns:
            what keeps them when the rows have the step's tokens; None if that is done.
        """
        ...


class FeatureTap:
    """Keeps the hidden states of one step for a draft head, and nothing without a head.

    Args:
        features: what the head reads of this rank's stage.
        max_graph_tokens: tokens of the largest recorded step.

    Attributes:
        head: gets the hidden states; None without one.
        is_open: keep the hidden states of the following steps. Recorded steps always keep them.
    """

    def __init__(
        self,
        head: FeatureReader | None = None,
        features: Features = NO_FEATURES,
        max_graph_tokens: int = 0,
    ) -> None:
        self.head = head
        self.is_open = self._keeps_states = head is not None  # the latter: of the last plan
        self._kind = features
        self._max_graph_tokens = max_graph_tokens
        self._features: Tensor | None = None
        self._buffer: Tensor | None = None  # of all graphs

    def begin_step(self, plan: StepPlan) -> None:
        """Open or close the tap for a plan whose tokens are drafted."""
        if self.head is None or not (plan.keeps_states or self._keeps_states):
            return
        if not plan.keeps_states:
            self.head.drop_states()
        self.is_open = plan.keeps_states and self.head.wants_features
        self._keeps_states = plan.keeps_states

    def make_aux(self) -> AuxStates | None:
        """Return what the forward pass of all tokens is to collect for `keep`, if anything."""
        return AuxStates(self._kind) if self.is_open and self._kind else None

    def keep(self, hidden: Tensor, aux: AuxStates | None) -> None:
        """Keep the hidden states of a forward pass, if the tap is open.

        Args:
            hidden: [T, E], its result.
        """
        if not self.is_open:
            return
        if aux is not None:
            self._features = aux.join()
        else:
            self._features = hidden if self._kind is None else hidden[:, :0]

    def keep_replayed(self) -> None:
        """Let the replays of a step that is being recorded write what `keep` got to a buffer."""
        if self._features is None:
            return
        if self._buffer is None:
            self._buffer = self._features.new_empty(self._max_graph_tokens, self._features.shape[1])
        self._buffer[: len(self._features)].copy_(self._features)

    def end_step(self, batch: Batch, num_replayed_decodes: int | None) -> Record | None:
        """Give the head the hidden states of a step, whose sampled tokens the rows of the last stage have.

        Args:
            num_replayed_decodes: decodes of the graph that computed the step, with padding; None if it was not
                replayed.

        Returns:
            as FeatureReader.record; None if the tap is closed.
        """
        if not self.is_open or self.head is None:
            return None
        return self.head.record(batch, self._features_of(batch, num_replayed_decodes))

    def reset(self) -> None:
        """Open the tap, and let the next plan decide, whatever the last one said."""
        self.is_open = self._keeps_states = self.head is not None

    def _features_of(self, batch: Batch, num_replayed_decodes: int | None) -> Tensor:
        """Return the hidden states of the step's tokens, [T, F]."""
        if num_replayed_decodes is None:
            assert self._features is not None
            return self._features
        assert self._buffer is not None
        num_decodes = batch.num_decodes
        num_others = len(batch.token_ids) - num_decodes
        first = num_replayed_decodes
        parts = self._buffer[:num_decodes], self._buffer[first : first + num_others]
        return torch.cat(parts)
