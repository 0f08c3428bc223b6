"""Hidden states for the draft head of a model in pipeline stages.

The first stage, which drafts for all, has the head. Each other stage sends it what the head reads of its layers, when
it has computed a step. The first stage goes on meanwhile: the head gets a step's hidden states together with its
tokens, before the next step that drafts for one of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ...proto.config import SpeculativeConfig
from ...proto.model.eagle3_config import aux_layers
from ...proto.model.parallel_split import ParallelSplit, Stage
from ..comm.pipeline import StageLink
from ..step.batch import Batch
from ..step.unsettled_steps import Record, SettledStep
from .feature_tap import NO_FEATURES, Features
from .head_proposer import HeadProposer


class SentFeatures:
    """FeatureReader of a later stage, which sends the hidden states to the first one."""

    wants_features = True

    def __init__(self, link: StageLink) -> None:
        self._link = link

    def drop_states(self) -> None:
        """Do nothing: the first stage has the states."""

    def record(self, batch: Batch, features: Tensor) -> None:
        self._link.send_features(features)


class GatheredFeatures:
    """FeatureReader of the first stage, which joins the hidden states of all stages for the head.

    Args:
        widths: stage |-> numbers per token that it sends, by ascending stage.
    """

    wants_features = True  # others send them while the head pauses, which they do not know

    def __init__(self, head: HeadProposer, widths: Mapping[int, int], link: StageLink) -> None:
        self._head, self._widths, self._link = head, widths, link
        self._num_drops = 0

    def drop_states(self) -> None:
        self._head.drop_states()
        self._num_drops += 1

    def record(self, batch: Batch, features: Tensor) -> Record:
        for stage, width in self._widths.items():
            self._link.expect_features(stage, features.new_empty(len(features), width))
        return partial(self._join, batch, features, self._num_drops)

    def _join(self, batch: Batch, features: Tensor, num_drops: int, settled: SettledStep) -> None:
        """Give the head a step unless the states were dropped since, with the number of drops before it."""
        parts = [features, *(self._link.take_features(stage) for stage in self._widths)]
        if self._head.wants_features and num_drops == self._num_drops:
            self._head.record(batch, torch.cat(parts, dim=-1), settled)


def features_of(speculative: SpeculativeConfig, stage: Stage, num_layers: int) -> Features:
    """Return what the draft head reads of a stage.

    Args:
        num_layers: of the whole model.
    """
    assert speculative.draft is not None, "the drafts are by a head"
    if speculative.method == "mtp":
        return None if stage.is_last else NO_FEATURES
    end = num_layers + 1 if stage.is_last or stage.end is None else stage.end
    own = range(stage.first, end)
    return frozenset(
        layer - stage.first for layer in aux_layers(speculative.draft, num_layers) if layer in own
    )


def widths_of(
    speculative: SpeculativeConfig, split: ParallelSplit, num_layers: int, hidden_size: int
) -> dict[int, int]:
    """Return stage |-> numbers per token that it sends for the draft head, of the stages that send some."""
    later = [split.stage(index) for index in range(1, split.pipeline)]
    parts = {stage.index: features_of(speculative, stage, num_layers) for stage in later}
    return {
        index: hidden_size * (1 if part is None else len(part))
        for index, part in parts.items()
        if part != NO_FEATURES
    }
