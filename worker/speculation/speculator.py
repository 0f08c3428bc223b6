"""Speculator: drafts the tokens that a step verifies."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...kernels.suffix_automaton import SuffixIndex, make_suffix_index
from ...proto.block_tables import IntArray, RowArray
from ...proto.config import SpeculativeConfig
from ...proto.step import StepPlan
from ..step.device_rows import DeviceRows


class DraftProposer(Protocol):
    """Source of drafted tokens. All ranks propose the same ones, from what all of them know."""

    def forget(self, rows: RowArray) -> None:
        """Forget the sequences of rows that were emptied."""
        ...

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        """Write tokens that may follow the newest token of each row behind it.

        Args:
            rows: [n], rows that decode in the step; at least one.
            max_lens: [n], most tokens of each row.

        Returns:
            [n] int32, the number of tokens of each row; may be 0.
        """
        ...


class NoProposer:
    """DraftProposer that drafts nothing."""

    def forget(self, rows: RowArray) -> None:
        """Do nothing."""

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        return np.zeros(rows.size, np.int32)


class Speculator:
    """Drafts tokens behind the known ones of their rows: jump-forward tokens, and for other rows proposals.

    A grammar may leave no choice of the next text, but of the tokens that spell it. The draft is the spelling of the
    tokenizer. It is verified like any other, so the model may still choose another one.

    Args:
        proposer: drafts for rows without jump-forward tokens.
        jumps_forward: this rank knows which text is forced: of several pipeline stages only the last one does.
    """

    def __init__(self, rows: DeviceRows, proposer: DraftProposer, *, jumps_forward: bool = True) -> None:
        self._rows = rows
        self.proposer = proposer
        self._jumps_forward = jumps_forward

    def clear(self) -> None:
        """Forget the sequences of all rows."""
        self.forget(np.arange(self._rows.lens.size))

    def forget(self, rows: IntArray | RowArray) -> None:
        """Forget the sequences of rows that were emptied."""
        self.proposer.forget(rows.astype(np.intp, copy=False))

    def draft(self, plan: StepPlan) -> IntArray | None:
        """Draft tokens for a plan that the rows have applied. Returns None if no row has any.

        Returns:
            [R] int32, the number of drafted tokens of each row.

        Raises:
            ValueError: the plan drafts for a row that does not decode in the step; names the row.
        """
        rows = plan.draft_rows.astype(np.intp)
        self._check(plan, rows)
        lens = self._propose(rows, plan.draft_lens)
        if not np.count_nonzero(lens):
            return None
        num_drafted = np.zeros(self._rows.lens.size, np.int32)
        num_drafted[rows] = lens
        return num_drafted

    def _propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        if not self._jumps_forward:
            return self.proposer.propose(rows, max_lens)
        forced = [
            self._rows.logits_processors.jump_forward_ids(row, max_len)
            for row, max_len in zip(rows.tolist(), max_lens.tolist(), strict=True)
        ]
        if not any(forced):
            return self.proposer.propose(rows, max_lens)
        lens = np.array([len(own) for own in forced], np.int32)
        is_free = lens == 0
        token_ids = np.array([token_id for own in forced for token_id in own], np.int32)
        self._rows.write_drafts(rows[~is_free], lens[~is_free], token_ids)
        if is_free.any():
            lens[is_free] = self.proposer.propose(rows[is_free], max_lens[is_free])
        return lens

    def _check(self, plan: StepPlan, rows: RowArray) -> None:
        is_wrong = ~self._rows.decoding[rows]
        if plan.held_rows.size:
            is_wrong |= np.isin(rows, plan.held_rows)
        if np.count_nonzero(is_wrong):
            raise ValueError(f"the plan drafts for row {rows[is_wrong][0]}, which does not decode")


_NO_LIMIT = np.iinfo(np.int32).max


class NgramProposer:
    """Drafts of repeated text. The suffixes of a row are indexed when the row drafts for the first time."""

    def __init__(self, config: SpeculativeConfig, rows: DeviceRows) -> None:
        self._min_len = config.prompt_lookup_min
        self._max_len = config.prompt_lookup_max or _NO_LIMIT
        self._rows = rows
        self._indices: dict[int, SuffixIndex] = {}  # row |-> index of its tokens
        self._num_indexed: IntArray = np.zeros_like(rows.lens)

    def forget(self, rows: RowArray) -> None:
        for row in rows.tolist():
            self._indices.pop(row, None)
        self._num_indexed[rows] = 0

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        self._rows.unsettled.settle()  # the suffixes are on the host
        news = self._rows.read_tokens(rows, self._num_indexed[rows], self._rows.lens[rows])
        self._num_indexed[rows] = self._rows.lens[rows]
        drafts = [
            self._continue(row, new, max_len)
            for row, new, max_len in zip(rows.tolist(), news, max_lens.tolist(), strict=True)
        ]
        lens = np.array([draft.size for draft in drafts], np.int32)
        if lens.any():
            self._rows.write_drafts(rows, lens, np.concatenate(drafts))
        return lens

    def _continue(self, row: int, new: IntArray, max_len: int) -> IntArray:
        """Index the new tokens of a row; return its draft, which is no longer than the suffix that it continues."""
        index = self._indices.get(row)
        if index is None:
            index = self._indices[row] = make_suffix_index()
        index.extend(new)
        token_ids, match_len = index.propose(max_len, self._min_len, self._max_len)
        return token_ids[:match_len]
