"""Speculator: drafts the tokens that a step verifies."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray
from ...proto.step import StepPlan
from ..step.batch import Batch
from ..step.device_rows import DeviceRows
from .forced import ForcedProposer
from .head_proposer import HeadProposer
from .proposer import DraftProposer


class Speculator:
    """Drafts tokens behind the known ones of their rows.

    Args:
        proposer: drafts what no constraint forces; None for nothing.
    """

    def __init__(self, rows: DeviceRows, proposer: DraftProposer | None = None) -> None:
        self._rows = rows
        self._head = proposer if isinstance(proposer, HeadProposer) else None
        self._proposer: DraftProposer = ForcedProposer(proposer, rows)

    def clear(self) -> None:
        """Forget the sequences of all rows."""
        self._proposer.forget(np.arange(self._rows.lens.size))

    @property
    def wants_features(self) -> bool:
        """Return whether a draft head is to get the hidden states of the next step."""
        return self._head is not None and self._head.wants_features

    def drop_states(self) -> None:
        """Let a draft head forget hidden states; it gets those of later steps that have them kept."""
        if self._head is not None:
            self._head.drop_states()

    def record(self, batch: Batch, features: Tensor) -> None:
        """Give a draft head the hidden states of a step, whose sampled tokens the rows have; see HeadProposer."""
        if self._head is not None:
            self._head.record(batch, features)

    def draft(self, plan: StepPlan) -> IntArray | None:
        """Draft tokens for a plan that the rows have applied. Returns None if no row has any.

        Returns:
            [R] int32, the number of drafted tokens of each row.

        Raises:
            ValueError: the plan drafts for a row that does not decode in the step; names the row.
        """
        if plan.released_rows.size:
            self._proposer.forget(plan.released_rows.astype(np.intp))
        if not plan.draft_rows.size:
            return None
        rows = plan.draft_rows.astype(np.intp)
        self._check(plan, rows)
        lens = self._proposer.propose(rows, plan.draft_lens)
        if not np.count_nonzero(lens):
            return None
        num_drafted = np.zeros(self._rows.lens.size, np.int32)
        num_drafted[rows] = lens
        return num_drafted

    def _check(self, plan: StepPlan, rows: RowArray) -> None:
        is_wrong = ~self._rows.decoding[rows]
        if plan.held_rows.size:
            is_wrong |= np.isin(rows, plan.held_rows)
        if np.count_nonzero(is_wrong):
            raise ValueError(f"the plan drafts for row {rows[is_wrong][0]}, which does not decode")
