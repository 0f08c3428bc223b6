"""Distribution: counts of values by size, in memory that does not grow with their number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

PER_DECADE = 400
_LEAST, _DECADES = 1e-6, 12
_SIZE = PER_DECADE * _DECADES
# Of a normal distribution, both sides of a confidence interval of 95 %.
_Z = 1.96


class Distribution:
    """Positive values counted in buckets of equal ratio: quantiles are exact to 0.3 %.

    Attributes:
        count, total: of all values.
    """

    def __init__(self) -> None:
        self._counts = [0] * _SIZE
        self.count, self.total = 0, 0.0
        self._latest, self._place = -1.0, 0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, or many equal ones. The tokens of a step have equal gaps, so the latest place is kept."""
        if value != self._latest:
            self._latest, self._place = value, _place_of(value)
        self._counts[self._place] += count
        self.count += count
        self.total += value * count

    def add_all(self, values: Iterable[float], count: int) -> None:
        """Count each value so often."""
        counts, total, num_values = self._counts, self.total, 0
        for value in values:
            counts[_place_of(value)] += count
            total += value * count
            num_values += 1
        self.total = total
        self.count += num_values * count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the value that `share` of all values do not exceed; 0 without values."""
        if not self.count:
            return 0.0
        rank = min(self.count - 1, max(0, math.ceil(share * self.count) - 1))
        place = int(np.searchsorted(np.cumsum(self._counts), rank, side="right"))
        return float(_LEAST * 10 ** ((place + 0.5) / PER_DECADE)) if place else 0.0

    def interval(self, share: float) -> tuple[float, float]:
        """Return a confidence interval of 95 % of a quantile, of independent values."""
        margin = _Z * math.sqrt(share * (1 - share) / max(1, self.count))
        return self.quantile(max(0.0, share - margin)), self.quantile(min(1.0, share + margin))

    def summary(self) -> dict[str, Any]:
        """Return mean, quantiles and their confidence intervals, for JSON."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        return {
            "count": self.count,
            "mean": self.mean,
            **{name: self.quantile(share) for name, share in shares.items()},
            **{f"{name}_interval": list(self.interval(share)) for name, share in shares.items()},
        }


def _place_of(value: float) -> int:
    return min(_SIZE - 1, int(math.log10(max(value, _LEAST) / _LEAST) * PER_DECADE))
