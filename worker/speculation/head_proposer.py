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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray, runs_of
from ..attention import LayerCache
from ..batch import Batch
from ..device_rows import DeviceRows
from ..memory.host_to_device import to_device_once
from ..models.draft_head import DraftHead
from ..sampling.sampler import Sampler
from .draft_chain import sample_drafts
from .draft_inputs import MAX_DECODED_TOKENS, gather_draft_inputs
from .fused_chain import plan_fused_chain

# Hidden states that are kept for pairs to compute, of all rows.
MAX_PENDING_BYTES = 64 << 20
# Steps without planned drafts after which hidden states of at most so many tokens are kept. One sequence can draft
# again at any time; for many sequences, computing the tokens of a pause would cost more than the drafts gain.
MAX_IDLE_STEPS, MAX_IDLE_TOKENS = 16, 1024
# The chain of drafts reads weights in bfloat16. The linear layers of a drafted token take 0.53 instead of 1.10 ms for
# a target of 60M parameters, whose output layer is most of it, and 46 instead of 53 us for the demo model.
NARROWS = True
_UNKNOWN = -1


@dataclass(slots=True)
class _Pairs:
    """Pairs of one step to compute.

    Attributes:
        rows: [n], distinct.
        counts: [n] int32, pairs of each row, which follow its earlier ones.
        features: [T, F], hidden states of the step's tokens.
        index: [sum of counts], those of the pairs among the T; those of a row are adjacent.
    """

    rows: RowArray
    counts: IntArray
    features: Tensor
    index: RowArray

    def select(self, is_chosen: npt.NDArray[np.bool_]) -> _Pairs:
        """Return the pairs of some of the rows."""
        index = self.index[np.repeat(is_chosen, self.counts)]
        return _Pairs(self.rows[is_chosen], self.counts[is_chosen], self.features, index)


class HeadProposer:
    """Drafts of one rank's part of a head.

    Args:
        layers: returns the head's KV cache, which is allocated later.
    """

    def __init__(
        self,
        rows: DeviceRows,
        head: DraftHead,
        sampler: Sampler,
        layers: Callable[[], list[LayerCache]],
        block_size: int,
    ) -> None:
        self._rows, self._head, self._sampler = rows, head, sampler
        self._layers, self._block_size = layers, block_size
        self._fused = plan_fused_chain(rows, head, layers, token_offset=1, narrows=NARROWS)
        # Pairs of each row that are in the head's cache, or are missing; _UNKNOWN until hidden states are kept.
        self._num_computed: IntArray = np.full_like(rows.lens, _UNKNOWN)
        self._pending: list[_Pairs] = []
        self._num_pending = self._pending_bytes = 0
        self._all_rows: RowArray = np.arange(rows.lens.size)
        self._all_tokens: RowArray = np.arange(1)  # for steps whose tokens are all known
        self._num_idle_steps = 0
        self._is_paused = False

    @property
    def wants_features(self) -> bool:
        """Return whether the next step is to keep the hidden states that the head reads."""
        return not self._is_paused

    def forget(self, rows: RowArray) -> None:
        self._num_computed[rows] = _UNKNOWN
        self._take(rows)

    def record(self, batch: Batch, features: Tensor | None) -> None:
        """Keep the hidden states of a step, whose sampled tokens the rows have.

        Args:
            features: [T, F], or None if they were not kept.
        """
        self._num_idle_steps += 1
        if features is None:
            self._num_computed.fill(_UNKNOWN)
            self._take(self._all_rows)
            return
        is_new = self._num_computed[batch.row_ids] == _UNKNOWN
        if np.count_nonzero(is_new):
            self._num_computed[batch.row_ids[is_new]] = batch.row_starts[is_new]
        pairs = self._pairs_of(batch, features)
        self._pending.append(pairs)
        self._num_pending += pairs.index.size
        self._pending_bytes += features.nbytes
        self._is_paused = self._num_idle_steps > MAX_IDLE_STEPS and self._num_pending > MAX_IDLE_TOKENS
        if self._pending_bytes > MAX_PENDING_BYTES:
            known = _join(self._take(self._all_rows))
            self._compute(known, self._advance_rows(known))

    def _pairs_of(self, batch: Batch, features: Tensor) -> _Pairs:
        """Return the pairs of a step: a token whose next one is known is the first of a pair."""
        rows, known_lens = batch.row_ids, self._rows.lens
        if not batch.has_drafts:
            num_tokens = batch.token_rows.size
            if self._all_tokens.size < num_tokens:
                self._all_tokens = np.arange(num_tokens)
            return _Pairs(rows, batch.row_lens, features, self._all_tokens[:num_tokens])
        is_known = batch.token_positions < known_lens[batch.token_rows] - 1
        counts = np.minimum(batch.row_lens, known_lens[rows] - 1 - batch.row_starts)
        return _Pairs(rows, counts, features, is_known.nonzero()[0])

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        self._num_idle_steps = 0
        self._is_paused = False
        taken, lens = self._take(rows), np.zeros(rows.size, np.int32)
        if not taken:
            return lens
        known = _join(taken)
        starts = self._advance_rows(known)
        ends = starts + known.counts
        # As a rule all of `rows` have pairs.
        places = slice(None) if known.rows.size == rows.size else np.searchsorted(rows, known.rows)
        limits = np.where(ends == self._rows.lens[known.rows] - 1, max_lens[places], 0)
        lens[places] = limits
        is_short = max(known.counts.tolist()) <= MAX_DECODED_TOKENS
        if self._fused is not None and is_short and np.count_nonzero(limits):
            self._fused.compute_and_draft(known.rows, ends, known.counts, limits, known.features, known.index)
        else:
            hidden, drafting = self._compute(known, starts), np.flatnonzero(limits)
            self._draft(known.rows[drafting], limits[drafting], _select(hidden, drafting))
        return lens

    def _draft(self, rows: RowArray, limits: IntArray, hidden: Tensor) -> None:
        """Draft up to `limits` tokens of each row; `hidden` is [n, E], of the newest pair of each row."""
        if self._fused is not None and rows.size:
            self._fused.continue_from(rows, limits, hidden)
        else:
            sample_drafts(self._rows, self._sampler, rows, limits, hidden, self._head.logits, self._advance)

    def _advance(self, rows: RowArray, positions: IntArray, hidden: Tensor) -> Tensor:
        """Compute the pairs of drafted tokens and the head's own hidden states."""
        return self._forward(rows, positions - 1, np.ones_like(positions), hidden)

    def _compute(self, known: _Pairs, starts: IntArray) -> Tensor:
        """Compute pairs; return the head's hidden states of each row's last one, [n, E].

        Args:
            starts: [n], positions of each row's first pair.
        """
        features = _select(known.features, known.index)
        hidden = self._forward(known.rows, starts, known.counts, self._head.combine(features))
        return _select(hidden, np.cumsum(known.counts, dtype=np.int64) - 1)

    def _advance_rows(self, known: _Pairs) -> IntArray:
        """Count pairs as computed; return the positions of each row's first one."""
        starts = self._num_computed[known.rows]
        self._num_computed[known.rows] = starts + known.counts
        return starts

    def _take(self, rows: RowArray) -> list[_Pairs]:
        """Remove the pending pairs of distinct rows, and return them by step."""
        taken, self._pending = self._pending, []
        # After a step with drafts there is one, of the same rows.
        if len(taken) > 1 or (taken and not _are_same(taken[0].rows, rows)):
            wanted = np.zeros(self._rows.lens.size, np.bool_)
            wanted[rows] = True
            self._pending = [part for pairs in taken if (part := pairs.select(~wanted[pairs.rows])).rows.size]
            taken = [part for pairs in taken if (part := pairs.select(wanted[pairs.rows])).rows.size]
        self._num_pending = sum(pairs.index.size for pairs in self._pending)
        self._pending_bytes = sum(pairs.features.nbytes for pairs in self._pending)
        return taken

    def _forward(self, rows: RowArray, starts: IntArray, counts: IntArray, hidden: Tensor) -> Tensor:
        inputs = gather_draft_inputs(self._rows, rows, starts, counts, self._block_size, token_offset=1)
        return self._head.forward(
            inputs.token_ids, inputs.positions, hidden, self._layers(), inputs.attention
        )


def _join(parts: list[_Pairs]) -> _Pairs:
    """Return the pairs of one or more steps together, by ascending row; the steps are in their order."""
    if len(parts) == 1 and np.count_nonzero(parts[0].rows[1:] < parts[0].rows[:-1]) == 0:
        return parts[0]
    token_rows = np.concatenate([np.repeat(pairs.rows, pairs.counts) for pairs in parts])
    features, index = parts[0].features, parts[0].index
    if len(parts) > 1:
        features = torch.cat([_select(pairs.features, pairs.index) for pairs in parts])
        index = np.arange(token_rows.size)
    order = np.argsort(token_rows, kind="stable")
    token_rows, index = token_rows[order], index[order]
    firsts, counts = runs_of(token_rows)
    return _Pairs(token_rows[firsts], counts.astype(np.int32), features, index)


def _are_same(rows: RowArray, others: RowArray) -> bool:
    return rows.size == others.size and not np.count_nonzero(rows != others)


def _select(x: Tensor, index: RowArray) -> Tensor:
    return (
        x if len(index) == len(x) and _is_range(index) else x.index_select(0, to_device_once(index, x.device))
    )


def _is_range(index: RowArray) -> bool:
    return bool((index == np.arange(len(index))).all())
