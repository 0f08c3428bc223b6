"""RowShares: the share of trials that succeed, of each row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray, RowArray

FloatArray = npt.NDArray[np.float64]

# Trials of all rows for which the initial share counts, and trials of a row for which the share of all rows counts.
_INITIAL_TRIALS, _PRIOR_TRIALS = 8.0, 4.0
# Factors of the trials per step, of a row and of all: new ones count more, and what was given up is tried again.
_DECAY, _DECAY_OF_ALL = 0.95, 0.998


class RowShares:
    """Estimates of a probability, each of a row, drawn to that of all rows.

    Args:
        num_rows: rows (batch slots).
        initial: assumed share before any trial.
    """

    def __init__(self, num_rows: int, initial: float) -> None:
        self._initial = initial
        self._hits, self._trials = np.zeros(num_rows), np.zeros(num_rows)
        self._all_hits = self._all_trials = 0.0

    def of(self, rows: RowArray) -> FloatArray:
        """Return the estimates of rows, [n]."""
        prior = (self._all_hits + self._initial * _INITIAL_TRIALS) / (self._all_trials + _INITIAL_TRIALS)
        estimates: FloatArray = (self._hits[rows] + prior * _PRIOR_TRIALS) / (
            self._trials[rows] + _PRIOR_TRIALS
        )
        return estimates

    def add(self, rows: RowArray, hits: IntArray, trials: IntArray) -> None:
        """Count trials of rows, which may repeat, and how many of them succeeded."""
        np.add.at(self._hits, rows, hits)
        np.add.at(self._trials, rows, trials)
        self._all_hits += float(hits.sum())
        self._all_trials += float(trials.sum())

    def decay(self, num_steps: int) -> None:
        """Let the trials so far count less by a number of steps."""
        decay, decay_of_all = _DECAY**num_steps, _DECAY_OF_ALL**num_steps
        self._hits *= decay
        self._trials *= decay
        self._all_hits *= decay_of_all
        self._all_trials *= decay_of_all

    def forget(self, rows: RowArray) -> None:
        """Forget the trials of rows that have another sequence now."""
        self._hits[rows] = self._trials[rows] = 0.0
