"""PendingPairs: hidden states of steps, kept until a draft head computes their pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray
from ..memory.host_to_device import to_device_once


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a hidden state and the token after it, of one or more steps.

    Attributes:
        rows: [n], distinct.
        starts: [n] int32, the position of each row's first pair.
        counts: [n] int32, pairs of each row, at adjacent positions.
        features: [T, F], hidden states of the steps' tokens.
        index: [sum of counts], those of the pairs among the T; those of a row are adjacent. None if these are all.
    """

    rows: RowArray
    starts: IntArray
    counts: IntArray
    features: Tensor
    index: RowArray | None = None

    def own_features(self) -> Tensor:
        """Return the hidden states of the pairs, [sum of counts, F]."""
        return self.features if self.index is None else select_rows(self.features, self.index)

    def padded_features(self, width: int) -> Tensor:
        """Return the hidden states of each row's pairs in `width` places, [n * width, F]; the last one repeats."""
        firsts = np.cumsum(self.counts) - self.counts
        places = firsts[:, None] + np.minimum(np.arange(width), self.counts[:, None] - 1)
        flat = places.ravel().astype(np.int64)
        return select_rows(self.features, flat if self.index is None else self.index[flat])

    def newest(self) -> Pairs:
        """Return the last pair of each row."""
        last = np.cumsum(self.counts, dtype=np.int64) - 1
        starts = (self.starts + self.counts - 1).astype(np.int32)
        index = last if self.index is None else self.index[last]
        return Pairs(self.rows, starts, np.ones_like(self.counts), self.features, index)

    def select(self, is_selected: npt.NDArray[np.bool_]) -> Pairs:
        """Return the pairs of some of the rows."""
        is_own = np.repeat(is_selected, self.counts)
        index = np.flatnonzero(is_own) if self.index is None else self.index[is_own]
        return Pairs(
            self.rows[is_selected], self.starts[is_selected], self.counts[is_selected], self.features, index
        )


class PendingPairs:
    """Pairs by step. A step that is added costs no more than the entry of a list.

    Attributes:
        num_tokens, num_bytes: of the hidden states that are kept.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_tokens = self.num_bytes = 0
        self._steps: list[Pairs] = []
        self._num_dropped = 0  # steps before the first one that is kept
        # For each row, the number of the first step whose pairs it still needs.
        self._first_steps: RowArray = np.zeros(num_rows, np.int64)

    def add(self, pairs: Pairs) -> None:
        """Add the pairs of a step, which follow those of earlier steps."""
        self._steps.append(pairs)
        self.num_tokens += len(pairs.features)
        self.num_bytes += pairs.features.nbytes

    def has(self, rows: RowArray) -> bool:
        """Return whether there are pairs of any of the rows."""
        firsts = self._first_steps[rows]
        numbered = enumerate(self._steps, self._num_dropped)
        return any(np.isin(pairs.rows, rows[firsts <= number]).any() for number, pairs in numbered)

    def clear(self) -> None:
        self._drop(len(self._steps))

    def forget(self, rows: RowArray) -> None:
        """Remove the pairs of rows."""
        self._first_steps[rows] = self._num_dropped + len(self._steps)
        self._drop(self._count_unneeded())

    def take(self, rows: RowArray) -> Pairs | None:
        """Remove and return the pairs of distinct rows, by ascending row. Returns None if there are none."""
        if not self._steps or not rows.size:
            return None
        firsts, num_dropped = self._first_steps[rows], self._num_dropped
        # After a step with drafts there is one, of the same rows.
        if len(self._steps) == 1 and _are_same(self._steps[0].rows, rows) and firsts.max() <= num_dropped:
            taken = self._steps.copy()
            self.clear()
            return _join(taken)
        wanted = np.full(self._first_steps.size, np.iinfo(np.int64).max)
        wanted[rows] = firsts
        oldest = max(0, int(firsts.min()) - num_dropped)
        taken = []
        for number, pairs in enumerate(self._steps[oldest:], num_dropped + oldest):
            is_wanted = wanted[pairs.rows] <= number
            if is_wanted.all():
                taken.append(pairs)
            elif is_wanted.any():
                taken.append(pairs.select(is_wanted))
        self.forget(rows)
        return _join(taken) if taken else None

    def take_all(self) -> Pairs | None:
        return self.take(np.arange(self._first_steps.size))

    def _count_unneeded(self) -> int:
        """Return the number of the oldest steps that no row needs."""
        if not self._steps or (self._first_steps[self._steps[0].rows] <= self._num_dropped).any():
            return 0
        rows = np.concatenate([pairs.rows for pairs in self._steps])
        steps = np.repeat(np.arange(len(self._steps)), [pairs.rows.size for pairs in self._steps])
        needed = steps[self._first_steps[rows] <= steps + self._num_dropped]
        return int(needed[0]) if needed.size else len(self._steps)

    def _drop(self, count: int) -> None:
        """Drop the oldest steps."""
        for pairs in self._steps[:count]:
            self.num_tokens -= len(pairs.features)
            self.num_bytes -= pairs.features.nbytes
        del self._steps[:count]
        self._num_dropped += count


def _join(steps: list[Pairs]) -> Pairs:
    """Return the pairs of one or more steps together, by ascending row."""
    if len(steps) == 1 and np.count_nonzero(steps[0].rows[1:] < steps[0].rows[:-1]) == 0:
        return steps[0]
    rows, firsts, places = np.unique(
        np.concatenate([pairs.rows for pairs in steps]), return_index=True, return_inverse=True
    )
    all_counts = np.concatenate([pairs.counts for pairs in steps])
    order = np.argsort(np.repeat(places, all_counts), kind="stable")
    if len(steps) > 1:
        features = torch.cat([pairs.own_features() for pairs in steps])
    else:
        features, own = steps[0].features, steps[0].index
        order = order if own is None else own[order]
    return Pairs(
        rows,
        np.concatenate([pairs.starts for pairs in steps])[firsts],
        np.bincount(places, all_counts).astype(np.int32),
        features,
        order,
    )


def _are_same(rows: RowArray, others: RowArray) -> bool:
    return rows.size == others.size and not np.count_nonzero(rows != others)


def select_rows(x: Tensor, index: RowArray) -> Tensor:
    """Return rows of x [T, E] by their indices; x itself if these are all in order."""
    if len(index) == len(x) and (index == np.arange(len(index))).all():
        return x
    return x.index_select(0, to_device_once(index, x.device))
