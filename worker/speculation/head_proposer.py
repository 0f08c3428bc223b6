"""HeadProposer: drafts by a head that reads the target model's hidden states (EAGLE-3, multi-token prediction).

The head computes a pair of each token's hidden state and the next token, and predicts the token after that. Its keys
and values are in layers of their own of the same blocks, at the place of the pair's first token. They are computed
when the row next drafts, so that steps without drafts cost nothing but the memory of the hidden states.

A block of a cached prefix may hold the keys of a pair whose second token differs from this sequence's. Blocks that
were cached before their pairs were computed, and tokens whose hidden states were not kept, have older numbers in
their place. Either makes drafts less likely to be accepted, and changes no output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray
from ..attention import LayerCache
from ..models.drafts.draft_head import DraftHead
from ..sampling.sampler import Sampler
from ..step.batch import Batch
from ..step.device_rows import DeviceRows
from ..step.unsettled_steps import SettledStep
from .draft_chain import sample_drafts
from .draft_inputs import MAX_DECODED_TOKENS, gather_draft_inputs
from .fused_chain import plan_fused_chain
from .pending_pairs import Pairs, PendingPairs, select_rows

# Hidden states that are kept for pairs to compute, of all rows.
MAX_PENDING_BYTES = 64 << 20
# Steps without planned drafts after which hidden states of at most so many tokens are kept. One sequence can draft
# again at any time; for many sequences, computing the tokens of a pause would cost more than the drafts gain.
MAX_IDLE_STEPS, MAX_IDLE_TOKENS = 16, 1024
# The chain of drafts reads weights in bfloat16. The linear layers of a drafted token take 0.53 instead of 1.10 ms for
# a target of 60M parameters, whose output layer is most of it, and 46 instead of 53 us for the demo model.
NARROWS = True
_NO_ROWS: RowArray = np.empty(0, np.intp)


class RecordedDrafts(Protocol):
    """The pass over a row's newest pairs and the drafts of the tokens that follow, recorded as graphs.

    Attributes:
        num_pairs: most pairs of a row; 0 if there are no graphs.
    """

    num_pairs: int

    def draft(
        self, rows: RowArray, lens: IntArray, counts: IntArray, limits: IntArray, features: Tensor
    ) -> None:
        """Draft as `sample_drafts` does; the device adds the accepted tokens of unsettled steps.

        Args:
            lens: [n], known tokens up to the later one of each row's last pair.
            counts, limits: [n], pairs of each row, and tokens to draft.
            features: [n * num_pairs, F], of the pairs; those in further places of a row are any.
        """
        ...


class NoRecordedDrafts:
    """RecordedDrafts of a rank that records none."""

    num_pairs = 0

    def draft(
        self, rows: RowArray, lens: IntArray, counts: IntArray, limits: IntArray, features: Tensor
    ) -> None:
        raise AssertionError("no drafts are recorded")


@dataclass(slots=True)
class _UnsettledStep:
    """The newest step with drafts, of which the host does not know the pairs yet.

    Attributes:
        features: [T, F].
        taken: rows whose pairs have been computed.
    """

    batch: Batch
    features: Tensor
    taken: RowArray


class HeadProposer:
    """Drafts of one rank's part of a head.

    Args:
        layers: returns the head's KV cache, which is allocated later.

    Attributes:
        head: predicts the tokens.
        graphs: recorded drafts of a GPU.
    """

    def __init__(
        self,
        rows: DeviceRows,
        head: DraftHead,
        sampler: Sampler,
        layers: Callable[[], list[LayerCache]],
        block_size: int,
    ) -> None:
        self._rows, self.head, self._sampler = rows, head, sampler
        self.graphs: RecordedDrafts = NoRecordedDrafts()
        self._layers, self._block_size = layers, block_size
        self._fused = plan_fused_chain(rows, head, layers, token_offset=1, narrows=NARROWS)
        self._pending = PendingPairs(rows.lens.size)
        self._unsettled: _UnsettledStep | None = None
        self._num_idle_steps = 0
        self._is_paused = False

    @property
    def is_fused(self) -> bool:
        """Return whether one native call computes all drafts of a step."""
        return self._fused is not None

    @property
    def wants_features(self) -> bool:
        """Return whether the next step is to keep the hidden states that the head reads."""
        return not self._is_paused

    def drop_states(self) -> None:
        """Forget all hidden states, and how long nothing was drafted."""
        self._rows.unsettled.settle()
        self._pending.clear()
        self._end_pause()

    def _end_pause(self) -> None:
        self._num_idle_steps, self._is_paused = 0, False

    def forget(self, rows: RowArray) -> None:
        self._pending.forget(rows)

    def record(self, batch: Batch, features: Tensor, settled: SettledStep | None = None) -> None:
        """Keep the hidden states of a step, [T, F], whose sampled tokens the rows have.

        Args:
            settled: of a step that was settled later; None of the last one.
        """
        if settled is None:
            step = _UnsettledStep(batch, features, _NO_ROWS)
            if self._rows.unsettled.defer(batch, partial(self._record_settled, step)):
                self._unsettled = step
                return
        self._num_idle_steps += 1
        pending, pairs = self._pending, self._pairs_of(batch, features, settled)
        if pairs.rows.size:
            pending.add(pairs)
        if self._num_idle_steps > MAX_IDLE_STEPS and pending.num_tokens > MAX_IDLE_TOKENS:
            self._is_paused = True
            pending.clear()
        if pending.num_bytes > MAX_PENDING_BYTES:
            known = pending.take_all()
            assert known is not None, "the step was added"
            self._compute(known)

    def _record_settled(self, step: _UnsettledStep, settled: SettledStep) -> None:
        """As `record`, except for rows whose pairs have been computed, or if hidden states were dropped since."""
        if self._unsettled is step:
            self._unsettled = None
        settled.is_live[step.taken] = False
        self.record(step.batch, step.features, settled)

    def _pairs_of(self, batch: Batch, features: Tensor, settled: SettledStep | None) -> Pairs:
        """Return the pairs of a step: a token whose next one is known is the first of a pair."""
        rows, starts, positions = batch.row_ids, batch.row_starts, batch.token_positions
        if settled is not None:
            starts = starts + settled.shifts[rows]
            positions = positions + settled.shifts[batch.token_rows]
        if not batch.has_drafts:
            pairs = Pairs(rows, starts, batch.row_lens, features)
        else:
            known_lens = self._rows.lens
            if settled is not None:  # of other sequences nothing is known
                known_lens = np.where(settled.is_live, settled.lens, np.int32(np.iinfo(np.int32).max))
            is_known = positions < known_lens[batch.token_rows] - 1
            counts = np.minimum(batch.row_lens, known_lens[rows] - 1 - starts)
            pairs = Pairs(rows, starts, counts, features, is_known.nonzero()[0])
        return (
            pairs if settled is None or settled.is_live[rows].all() else pairs.select(settled.is_live[rows])
        )

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        self._end_pause()
        if self._draft_unsettled(rows, max_lens):
            return max_lens
        self._rows.unsettled.settle()
        known, lens = self._pending.take(rows), np.zeros(rows.size, np.int32)
        if known is None:
            return lens
        ends = known.starts + known.counts
        # As a rule all of `rows` have pairs.
        places = slice(None) if known.rows.size == rows.size else np.searchsorted(rows, known.rows)
        limits = np.where(ends == self._rows.lens[known.rows] - 1, max_lens[places], 0)
        lens[places] = limits
        is_short = max(known.counts.tolist()) <= MAX_DECODED_TOKENS
        if self._fused is not None and is_short and np.count_nonzero(limits):
            index = np.arange(len(known.features)) if known.index is None else known.index
            self._fused.compute_and_draft(known.rows, ends, known.counts, limits, known.features, index)
        elif self.graphs.num_pairs:
            self._draft_recorded(known, limits)
        else:
            hidden, drafting = self._compute(known), np.flatnonzero(limits)
            self._draft(known.rows[drafting], limits[drafting], select_rows(hidden, drafting))
        return lens

    def _draft_unsettled(self, rows: RowArray, max_lens: IntArray) -> bool:
        """Draft for rows whose pairs are all of a step that only the device knows the accepted tokens of.

        Returns:
            whether these are all such rows, and there are graphs; nothing is drafted otherwise.
        """
        step, graphs = self._unsettled, self.graphs
        if step is None or not self._rows.unsettled.is_newest(step.batch) or self._pending.has(rows):
            return False
        batch = step.batch
        if len(batch.rows) > batch.num_decodes or batch.row_lens.max() > graphs.num_pairs:
            return False
        is_drafting = np.isin(batch.row_ids, rows)
        if np.count_nonzero(is_drafting) < rows.size or np.isin(rows, step.taken).any():
            return False
        pairs = Pairs(batch.row_ids, batch.row_starts, batch.row_lens, step.features).select(is_drafting)
        # The pair of the token that was the newest one is certain; the device adds those of accepted drafts.
        lens, certain = self._rows.lens[rows], np.ones(rows.size, np.int32)
        step.taken = np.append(step.taken, rows)
        graphs.draft(rows, lens, certain, max_lens, pairs.padded_features(graphs.num_pairs))
        return True

    def _draft_recorded(self, known: Pairs, limits: IntArray) -> None:
        """Compute known pairs and draft by graphs, after an eager pass if there are many pairs, as of a prompt."""
        graphs = self.graphs
        if known.counts.max() > graphs.num_pairs:
            self._compute(known)
            known, limits = known.newest().select(limits > 0), limits[limits > 0]
        if known.rows.size:
            lens = known.starts + known.counts + 1
            graphs.draft(known.rows, lens, known.counts, limits, known.padded_features(graphs.num_pairs))

    def _draft(self, rows: RowArray, limits: IntArray, hidden: Tensor) -> None:
        """Draft up to `limits` tokens of each row; `hidden` is [n, E], of the newest pair of each row."""
        if self._fused is not None and rows.size:
            self._fused.continue_from(rows, limits, hidden)
        else:
            sample_drafts(self._rows, self._sampler, rows, limits, hidden, self.head.logits, self._advance)

    def _advance(self, rows: RowArray, positions: IntArray, hidden: Tensor) -> Tensor:
        """Compute the pairs of drafted tokens and the head's own hidden states."""
        return self._forward(rows, positions - 1, np.ones_like(positions), hidden)

    def _compute(self, known: Pairs) -> Tensor:
        """Compute pairs; return the head's hidden states of each row's last one, [n, E]."""
        combined = self.head.combine(known.own_features())
        hidden = self._forward(known.rows, known.starts, known.counts, combined)
        return select_rows(hidden, np.cumsum(known.counts, dtype=np.int64) - 1)

    def _forward(self, rows: RowArray, starts: IntArray, counts: IntArray, hidden: Tensor) -> Tensor:
        inputs = gather_draft_inputs(self._rows, rows, starts, counts, self._block_size, token_offset=1)
        return self.head.forward(inputs.token_ids, inputs.positions, hidden, self._layers(), inputs.attention)
