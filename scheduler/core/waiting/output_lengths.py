"""OutputLengths: predicts how many tokens an output will have, learned from the outputs that ended."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

# Outputs that the estimate is made of, the latest ones.
WINDOW = 256
# The estimate is made again after this many ends: 25 us each.
_REFRESH_ENDS = 16

FloatArray = npt.NDArray[np.float64]


class OutputLengths:
    """The share of outputs that are longer than a number of tokens.

    An output that ended by its limit would have been longer: it is a censored observation of the estimator by Kaplan
    and Meier (Nonparametric Estimation from Incomplete Observations, 1958). If most outputs end by their limits, the
    prediction is the limit.
    """

    def __init__(self) -> None:
        self._ends: deque[tuple[int, bool]] = deque(maxlen=WINDOW)  # (tokens, whether it stopped by itself)
        self._num_new = 0
        # From each of `_lengths` tokens on, the share of outputs that are longer is `_longer`; `_area` is its
        # integral up to there.
        self._lengths: FloatArray = np.zeros(1)
        self._longer: FloatArray = np.ones(1)
        self._area: FloatArray = np.zeros(1)

    def add(self, num_tokens: int, has_stopped: bool) -> None:
        """Record the end of an output.

        Args:
            has_stopped: it ended by a stop token or a stop string, not by its limit.
        """
        self._ends.append((num_tokens, has_stopped))
        self._num_new += 1
        if self._num_new >= min(_REFRESH_ENDS, len(self._ends)):
            self._estimate()

    def expect(self, max_tokens: FloatArray, num_generated: FloatArray) -> FloatArray:
        """Return the expected number of further tokens of outputs, [n]; 0 before the first output ended.

        Args:
            max_tokens: [n], their limits.
            num_generated: [n], the tokens that they have.
        """
        if not self._ends:
            return np.zeros(max_tokens.shape)
        share = np.maximum(self._longer[self._segment(num_generated)], 1e-3)
        return np.maximum(self._integral(max_tokens) - self._integral(num_generated), 0.0) / share

    def expect_one(self, max_tokens: int, num_generated: int = 0) -> float:
        """Return the expected number of further tokens of one output; 0 before the first output ended."""
        return float(self.expect(np.array([max_tokens]), np.array([num_generated]))[0])

    def _estimate(self) -> None:
        self._num_new = 0
        ends = np.array(sorted(self._ends), np.float64)
        num_at_risk = np.arange(len(ends), 0, -1)
        self._lengths = np.concatenate([[0.0], ends[:, 0]])
        self._longer = np.concatenate([[1.0], np.cumprod(1.0 - ends[:, 1] / num_at_risk)])
        self._area = np.concatenate([[0.0], np.cumsum(self._longer[:-1] * np.diff(self._lengths))])

    def _segment(self, num_tokens: FloatArray) -> npt.NDArray[np.intp]:
        return np.searchsorted(self._lengths, num_tokens, side="right") - 1

    def _integral(self, num_tokens: FloatArray) -> FloatArray:
        segment = self._segment(num_tokens)
        area: FloatArray = self._area[segment] + self._longer[segment] * (num_tokens - self._lengths[segment])
        return area
