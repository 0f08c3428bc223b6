"""Chi-square test of counts against expected counts."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def assert_chi_square(counts: Tensor, expected: Tensor) -> None:
    """Assert that counts follow a distribution, with a false alarm about once in 10,000 calls.

    Outcomes with an expected count below 5 are pooled.
    """
    common = expected >= 5
    observed = torch.cat((counts[common], counts[~common].sum(0, keepdim=True)))
    wanted = torch.cat((expected[common], expected[~common].sum(0, keepdim=True)))
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    degrees = len(wanted) - 1
    if degrees == 0:
        return
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    # Wilson and Hilferty's normal approximation of the chi-square distribution.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, (
        f"chi-square {statistic:.1f} with {degrees} degrees of freedom; limit {limit:.1f}"
    )
