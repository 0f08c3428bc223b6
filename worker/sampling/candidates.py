"""Candidates: the most likely tokens of each row, and truncation of them by top_k, top_p and min_p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.sampling import truncation_mask
from .sampling_table import SamplingBatch


@dataclass(frozen=True, slots=True)
class Candidates:
    """Most likely tokens of N rows in descending order; ties are ordered by token id.

    Attributes:
        values: [N, K] float32, logits over temperature.
        token_ids: [N, K] int32.
        floor: [N]; every token above it is among the candidates. -inf if all tokens are candidates.
        log_total: [N], log of the sum of exp over the whole vocabulary.
    """

    values: Tensor
    token_ids: Tensor
    floor: Tensor
    log_total: Tensor


def sort_candidates(values: Tensor, token_ids: Tensor, floor: Tensor, log_total: Tensor) -> Candidates:
    """Return Candidates of [N, K] values and token ids that are in any order."""
    token_ids, by_id = token_ids.sort(dim=-1)
    values, order = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return Candidates(values, token_ids.gather(1, order), floor, log_total)


def truncate_candidates(
    candidates: Candidates, batch: SamplingBatch, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Apply top_k, top_p and min_p.

    Returns:
        the candidates to keep, [N, K] bool; and the rows for which these are exactly the tokens that truncation of
        the whole vocabulary keeps, [N] bool.
    """
    keep = truncation_mask(
        candidates.values, candidates.log_total, vocab_size, batch.top_k, batch.top_p, batch.min_p
    )
    num_above_floor = (candidates.values > candidates.floor.unsqueeze(1)).sum(dim=-1)
    has_all = candidates.floor == -torch.inf
    is_exact = (keep.sum(dim=-1) <= num_above_floor) & (
        (batch.top_k >= vocab_size) | (batch.top_k <= num_above_floor)
    )
    return keep, is_exact | has_all
