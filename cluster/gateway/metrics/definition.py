"""Metric: the definition of one metric as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

MODEL, REPLICA = "model_name", "engine"


class Kind(StrEnum):
    """Prometheus types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, as documented, exposed and drawn.

    Attributes:
        name: the metric's name without the suffixes of its samples (``_total``, ``_bucket``, ``_sum``, ``_count``).
        help: one sentence.
        unit: the unit in Grafana's names: ``short`` (a count), ``s``, ``percentunit`` (1 = 100 %), ``bytes``.
        labels: names of its labels, in the order of their values.
        buckets: upper bounds of a histogram's buckets, without infinity.
    """

    kind: Kind
    name: str
    help: str
    unit: str = "short"
    labels: tuple[str, ...] = (MODEL,)
    buckets: tuple[float, ...] = ()

    @property
    def sample_name(self) -> str:
        """Name to query: that of a counter's samples ends in ``_total``."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


# gauge(name, help, ...) and so on make the metric of a kind.
gauge, counter, histogram = (partial(Metric, kind) for kind in Kind)


def decades(first: float, last: float) -> tuple[float, ...]:
    """Return bucket bounds from `first` to `last`: 1, 2, 3, 5 and 7 times each power of ten."""
    bounds = (float(f"{digit}e{power}") for power in range(-6, 10) for digit in (1, 2, 3, 5, 7))
    return tuple(bound for bound in bounds if first <= bound <= last)


def powers_of_two(last: int) -> tuple[float, ...]:
    """Return 1, 2, 4, ... up to `last`."""
    return tuple(float(2**power) for power in range(last.bit_length()))
