"""StepTimes: the time of a step by its number of tokens, from measurements."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# A measurement counts at most as this many times the expected time, per token: other processes delay single steps.
_MAX_RATIO = 1.5
# Weight, in tokens^2, of the prior slope: without another, further tokens take no time, so that more are tried.
_PRIOR = 4.0
# Shorter steps count as this long: the clock may be coarse.
_MIN_S = 1e-6


class StepTimes:
    """A line through the measured times, by weighted least squares: time = start + slope * tokens.

    Single measurements vary more than the slope is worth, so means by number of tokens would not show it.

    Args:
        decay: factor of the weight of all earlier measurements per step; half after 140 steps with 0.995.
    """

    def __init__(self, decay: float = 0.995) -> None:
        self._decay = decay
        self._weight = self._tokens = self._seconds = 0.0  # weighted means, except the weight
        self._variance = self._covariance = 0.0  # weighted sums around the means

    @property
    def is_known(self) -> bool:
        """Return whether a step was measured."""
        return self._weight > 0

    @property
    def slope(self) -> float:
        """Return the seconds per further token: at least 0, and at most in proportion to the tokens."""
        return self._slope(0.0)

    def _slope(self, prior: float) -> float:
        slope = (self._covariance + _PRIOR * prior) / (self._variance + _PRIOR)
        return max(0.0, min(slope, self._seconds / self._tokens)) if self._weight else 0.0

    def slope_from(self, num_tokens: int, seconds: float) -> float:
        """Return the seconds per further token between a time and the mean of the measured ones; 0 at the mean."""
        further = self._tokens - num_tokens
        return max(0.0, (self._seconds - seconds) / further) if further > 0 else 0.0

    def fade(self, factor: float) -> None:
        """Let the measurements so far count less."""
        self._weight *= factor
        self._variance *= factor
        self._covariance *= factor

    def observe(self, num_tokens: int, seconds: float) -> float:
        """Record the time of a step; return as much of it as counts."""
        seconds = max(seconds, _MIN_S)
        if self._weight:
            ratio = max(1.0, num_tokens / self._tokens)
            expected = self._seconds + self.slope * (num_tokens - self._tokens)
            seconds = min(seconds, _MAX_RATIO * ratio * expected)
            if expected > _MAX_RATIO * seconds:  # then those before were delayed
                self._seconds += _MAX_RATIO * seconds - expected
        self._weight = self._decay * self._weight + 1.0
        share, to_tokens, to_seconds = 1.0 / self._weight, num_tokens - self._tokens, seconds - self._seconds
        self._tokens += share * to_tokens
        self._seconds += share * to_seconds
        self._variance = self._decay * self._variance + to_tokens * (num_tokens - self._tokens)
        self._covariance = self._decay * self._covariance + to_tokens * (seconds - self._seconds)
        return seconds

    def at(self, num_tokens: int) -> float:
        """Return the expected time of a step, as `seconds` does."""
        return max(_MIN_S, self._seconds + self.slope * (num_tokens - self._tokens))

    def seconds(self, num_tokens: npt.ArrayLike, prior_slope: float = 0.0) -> FloatArray:
        """Return the expected times of steps; call it only if is_known.

        Args:
            prior_slope: seconds per further token, as far as the measurements do not show them.
        """
        further = np.asarray(num_tokens, np.float64) - self._tokens
        times: FloatArray = self._seconds + self._slope(prior_slope) * further
        return times
