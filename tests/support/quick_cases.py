"""Cases of which `make test` runs a few, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrization, marked slow except for those of `quick`.

    A case is a value, or a tuple of values of as many parameters.
    """
    cases = list(cases)
    assert all(case in cases for case in quick), "a case that is to run is not among the cases"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow
        )
        for case in cases
    ]


def diagonal(*axes: Iterable[Any], shift: int = 0) -> list[Any]:
    """Return the product of the axes, marked slow except for as many cases as the longest axis has values.

    Each value of each axis is in one of them at least.

    Args:
        shift: tests with other shifts run other combinations.
    """
    values = [list(axis) for axis in axes]
    longest = max(values, key=len)
    quick = [
        tuple(own[(place + (0 if own is longest else shift)) % len(own)] for own in values)
        for place in range(len(longest))
    ]
    return slow_except(quick, product(*values))
