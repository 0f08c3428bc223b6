"""HeadProposer: drafts by a head that reads the target model's hidden states (EAGLE-3, multi-token prediction).

The head computes a pair of each token's hidden state and the next token, and predicts the token after that. Its keys
and values are in layers of their own of the same blocks, at the place of the pair's first token. They are computed
when the row next drafts, so that steps without drafts cost nothing but the memory of the hidden states.

A block of a cached prefix may hold the keys of a pair whose second token differs from this sequence's. Blocks that
were cached before their pairs were computed, and tokens whose hidden states were not kept, have older numbers in
their place. Either makes drafts less likely to be accepted, and changes no output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
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
_NO_ROW = -1


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs to compute.

    Attributes:
        rows: [t], of their first tokens; _NO_ROW for sequences that have ended.
        positions: [t], of their first tokens.
        features: [T, F], hidden states of the step's tokens.
        index: [t], those of the pairs among the T.
    """

    rows: IntArray
    positions: RowArray
    features: Tensor
    index: RowArray

    @property
    def num_bytes(self) -> int:
        return self.features.nbytes


@dataclass(frozen=True, slots=True)
class _KnownPairs:
    """Pairs of n distinct rows that follow those in the head's cache.

    Attributes:
        rows, starts, counts: [n] int32, ascending rows, positions of their first pairs, and numbers of pairs.
        features: [T, F], with their hidden states.
        index: [sum of counts], those of the pairs among the T.
    """

    rows: IntArray
    starts: IntArray
    counts: IntArray
    features: Tensor
    index: RowArray


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
        self._pending: deque[_Pairs] = deque()
        # Pairs of the last steps, which are not in `_pending` yet; their rows are the steps' own.
        self._recorded: list[_Pairs] = []
        self._num_pending = self._pending_bytes = 0  # of both
        self._all_tokens: RowArray = np.arange(1)  # 0, 1, ..., for steps whose tokens are all known
        self._num_idle_steps = 0
        self._is_paused = False

    @property
    def wants_features(self) -> bool:
        """Return whether the next step is to keep the hidden states that the head reads."""
        return not self._is_paused

    def forget(self, rows: IntArray) -> None:
        self._add_recorded()
        self._num_computed[rows] = _UNKNOWN
        if self._pending:
            self._drop(self._chosen(rows))

    def record(self, batch: Batch, features: Tensor | None) -> None:
        """Keep the hidden states of a step, whose sampled tokens the rows have.

        Args:
            features: [T, F], or None if they were not kept.
        """
        self._num_idle_steps += 1
        if features is None:
            self._recorded.clear()
            self._num_computed.fill(_UNKNOWN)
            self._drop([])
            return
        rows, positions = batch.token_rows, batch.token_positions
        if batch.has_drafts:
            index = np.flatnonzero(positions < self._rows.lens[rows] - 1)
            rows, positions = rows[index], positions[index]
        else:
            index = self._all_tokens[: rows.size]
            if index.size < rows.size:
                index = self._all_tokens = np.arange(rows.size)
        # Adding the pairs of each step here took 8.8 us instead of 2.4 us; steps that do not draft need none of them.
        self._recorded.append(_Pairs(rows, positions, features, index))
        self._num_pending += rows.size
        self._pending_bytes += features.nbytes
        self._is_paused = self._num_idle_steps > MAX_IDLE_STEPS and self._num_pending > MAX_IDLE_TOKENS
        if self._pending_bytes > MAX_PENDING_BYTES:
            known = self._take_known(np.arange(self._rows.lens.size, dtype=np.int32))
            if known is not None:
                self._compute(known)

    def _add_recorded(self) -> None:
        """Add the pairs of the steps since the last call, in order."""
        for pairs in self._recorded:
            is_new = self._num_computed[pairs.rows] == _UNKNOWN
            if is_new.any():
                # The last assignment counts: the first token's.
                self._num_computed[pairs.rows[is_new][::-1]] = pairs.positions[is_new][::-1]
            self._pending.append(_Pairs(pairs.rows.copy(), pairs.positions, pairs.features, pairs.index))
        self._recorded.clear()

    def propose(self, rows: IntArray, max_lens: IntArray) -> IntArray:
        self._num_idle_steps = 0
        self._is_paused = False
        known = self._take_known(rows)
        if known is None:
            return np.zeros(rows.size, np.int32)
        limit_of = np.zeros_like(self._rows.lens)
        limit_of[rows] = max_lens
        limits, ends = limit_of[known.rows], self._num_computed[known.rows]
        limits[ends != self._rows.lens[known.rows] - 1] = 0
        if self._fused is not None and limits.any() and known.counts.max() <= MAX_DECODED_TOKENS:
            self._fused.compute_and_draft(known.rows, ends, known.counts, limits, known.features, known.index)
        else:
            drafting = np.flatnonzero(limits)
            self._draft(known.rows[drafting], limits[drafting], _select(self._compute(known), drafting))
        limit_of[rows] = 0
        limit_of[known.rows] = limits
        return limit_of[rows]

    def _draft(self, rows: IntArray, limits: IntArray, hidden: Tensor) -> None:
        """Draft up to `limits` tokens of each row; `hidden` is [n, E], of the newest pair of each row."""
        if self._fused is not None and rows.size:
            self._fused.continue_from(rows, limits, hidden)
        else:
            sample_drafts(self._rows, self._sampler, rows, limits, hidden, self._head.logits, self._advance)

    def _advance(self, rows: IntArray, positions: IntArray, hidden: Tensor) -> Tensor:
        """Compute the pairs of drafted tokens and the head's own hidden states."""
        return self._forward(rows, positions - 1, np.ones_like(positions), hidden)

    def _compute(self, known: _KnownPairs) -> Tensor:
        """Compute pairs; return the head's hidden states of each row's last one, [n, E]."""
        features = _select(known.features, known.index)
        hidden = self._forward(known.rows, known.starts, known.counts, self._head.combine(features))
        return _select(hidden, np.cumsum(known.counts, dtype=np.int64) - 1)

    def _take_known(self, rows: IntArray) -> _KnownPairs | None:
        """Remove the pending pairs of rows, to be computed now. Returns None if there are none."""
        self._add_recorded()
        if not self._pending:
            return None
        chosen = self._chosen(rows)
        pairs, own = self._pending[0], chosen[0]
        token_rows, features, index = pairs.rows[own], pairs.features, pairs.index[own]
        if len(chosen) > 1:
            parts = list(zip(self._pending, chosen, strict=True))
            token_rows = np.concatenate([pairs.rows[own] for pairs, own in parts])
            features = torch.cat([_select(pairs.features, pairs.index[own]) for pairs, own in parts])
            index = np.arange(token_rows.size)
        self._drop(chosen)
        if token_rows.size == 0:
            return None
        if np.count_nonzero(token_rows[1:] < token_rows[:-1]):
            order = np.argsort(token_rows, kind="stable")
            token_rows, index = token_rows[order], index[order]
        firsts, counts = runs_of(token_rows)
        own_rows = token_rows[firsts]
        starts = self._num_computed[own_rows]
        self._num_computed[own_rows] = starts + counts
        return _KnownPairs(own_rows, starts, counts.astype(np.int32), features, index)

    def _chosen(self, rows: IntArray) -> list[RowArray]:
        """Return the indices of the pairs of rows in each of the pending ones."""
        wanted = np.zeros(self._rows.lens.size + 1, np.bool_)  # the last one is that of _NO_ROW
        wanted[rows] = True
        return [np.flatnonzero(wanted[pairs.rows]) for pairs in self._pending]

    def _drop(self, chosen: list[RowArray]) -> None:
        """Remove some of the pending pairs; all of them if `chosen` is empty."""
        kept: deque[_Pairs] = deque()
        for pairs, own in zip(self._pending, chosen, strict=bool(chosen)):
            pairs.rows[own] = _NO_ROW
            if (pairs.rows != _NO_ROW).any():
                kept.append(pairs)
        self._pending = kept
        self._num_pending = sum(pairs.rows.size for pairs in kept)
        self._pending_bytes = sum(pairs.num_bytes for pairs in kept)

    def _forward(self, rows: IntArray, starts: IntArray, counts: IntArray, hidden: Tensor) -> Tensor:
        inputs = gather_draft_inputs(self._rows, rows, starts, counts, self._block_size, token_offset=1)
        return self._head.forward(
            inputs.token_ids, inputs.positions, hidden, self._layers(), inputs.attention
        )


def _select(x: Tensor, index: RowArray) -> Tensor:
    return (
        x if len(index) == len(x) and _is_range(index) else x.index_select(0, to_device_once(index, x.device))
    )


def _is_range(index: RowArray) -> bool:
    return bool((index == np.arange(len(index))).all())
