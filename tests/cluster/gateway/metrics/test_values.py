"""HistogramValue and quantile."""

from __future__ import annotations

import pytest

from quire.cluster.gateway.metrics.definition import decades, powers_of_two
from quire.cluster.gateway.metrics.values import HistogramValue, quantile


def test_histogram_value_counts_a_bound_in_its_own_bucket() -> None:
    value = HistogramValue((1.0, 2.0))
    for observed in (0.5, 1.0, 1.5, 9.0):
        value.observe(observed)
    value.observe(2.0, count=3)
    assert value.cumulative() == [("1.0", 2), ("2.0", 6), ("+Inf", 7)]
    assert value.sum == 18.0


def test_quantile_interpolates_within_the_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(0.5, bounds, [0, 4, 0, 0]) == pytest.approx(1.5)
    assert quantile(0.25, bounds, [4, 0, 4, 0]) == pytest.approx(0.5)
    assert quantile(0.75, bounds, [4, 0, 4, 0]) == pytest.approx(3.0)
    assert quantile(0.99, bounds, [0, 0, 0, 5]) == 4.0
    assert quantile(0.5, bounds, [0, 0, 0, 0]) is None


def test_bucket_bounds_are_exact_decimals() -> None:
    assert decades(0.001, 0.1) == (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1)
    assert powers_of_two(8) == (1.0, 2.0, 4.0, 8.0)
