"""Verification of drafted tokens: which samples of a row count.

A row samples after its newest token and after each of its drafted ones. Sampling is a pure function of the logits,
the seed and the position, so the sample after the newest token is the one that a step without drafts would give. If
it equals the first drafted token, then the sample after that token is the next one that steps without drafts would
give, and so on. The output is therefore the same, token for token, at any temperature.

A drafted token x is accepted with its probability p(x), and no method that keeps the distribution accepts more of
fixed drafts: rejection sampling (Leviathan et al., 2023) accepts min(1, p(x) / q(x)), where q(x) is 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray, runs_of


class Verdict(NamedTuple):
    """The samples of a step that count.

    Attributes:
        retained: [n] int64 ascending, their indices among all samples.
        token_counts: [rows] int32, the number of them for each row; at least 1.
        num_drafted: [rows] int32, drafted tokens of each row.
    """

    retained: RowArray
    token_counts: IntArray
    num_drafted: IntArray


def verify(rows: RowArray, is_match: npt.NDArray[np.bool_]) -> Verdict:
    """Return the samples of each row up to the first that differs from the drafted token at its position.

    Args:
        rows: [N] ascending, the row of each sample; those of a row by ascending position.
        is_match: [N], the sample equals the drafted token; any value for the last of a row.
    """
    if rows[0] == rows[-1]:  # one row: 3 us instead of 15 us
        matches = is_match.tolist()
        matches[-1] = False
        count = matches.index(False) + 1
        return Verdict(np.arange(count), _one(count), _one(rows.size - 1))
    starts, lens = runs_of(rows)
    num_misses: IntArray = np.cumsum(~is_match) - ~is_match  # before each sample
    return verdict_of(rows, num_misses == np.repeat(num_misses[starts], lens))


def verify_on_device(rows: Tensor, is_match: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """As `verify`, without a wait of the host.

    Args:
        rows: [N] int64, as for `verify`.
        num_rows: R.

    Returns:
        the samples that count, [N] bool, and the accepted drafted tokens of each of the R rows, [R] int32.
    """
    is_miss = ~is_match
    num_misses = is_miss.cumsum(0) - is_miss.long()  # before each sample
    is_retained = num_misses == num_misses.index_select(0, torch.searchsorted(rows, rows))
    counts = torch.zeros(num_rows, dtype=torch.int32, device=rows.device)
    counts.index_add_(0, rows, is_retained.int())
    return is_retained, (counts - 1).clamp_(min=0)


def verdict_of(rows: RowArray, is_retained: npt.NDArray[np.bool_]) -> Verdict:
    """Return the samples of each row that count, [N] bool; `rows` is as for `verify`."""
    starts, lens = runs_of(rows)
    token_counts = np.add.reduceat(is_retained, starts, dtype=np.int32)
    return Verdict(np.flatnonzero(is_retained), token_counts, (lens - 1).astype(np.int32))


def _one(number: int) -> IntArray:
    return np.array([number], np.int32)
