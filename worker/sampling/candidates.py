"""Candidates: the likeliest tokens of rows that draw, and what top_k, top_p and min_p leave of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.sampling import kept_of_sorted


class SamplingBatch(NamedTuple):
    """Settings of rows that draw, [N] each, and their keys, [N, 2] int32, in the order of sample_top_k_top_p."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor

    def select(self, rows: Tensor) -> SamplingBatch:
        return SamplingBatch(*(setting[rows] for setting in self))


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens to draw from, likeliest first and equals by id.

    Attributes:
        values: [N, K] float32, logits over temperature.
        token_ids: [N, K] int32.
        floor: [N]; every token above it is among the candidates. -inf if all tokens are.
        log_total: [N], log of the sum of exp over the whole vocabulary.
    """

    values: Tensor
    token_ids: Tensor
    floor: Tensor
    log_total: Tensor


def sort_candidates(values: Tensor, token_ids: Tensor, floor: Tensor, log_total: Tensor) -> Candidates:
    """Candidates of [N, K] values and token ids in any order."""
    token_ids, by_id = token_ids.sort(dim=-1)
    values, order = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return Candidates(values, token_ids.gather(1, order), floor, log_total)


def kept_candidates(candidates: Candidates, draw: SamplingBatch, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Which candidates the cuts leave, [N, K] bool, and for which rows that is the exact answer, [N] bool."""
    keep = kept_of_sorted(
        candidates.values, candidates.log_total, vocab_size, draw.top_k, draw.top_p, draw.min_p
    )
    num_certain = (candidates.values > candidates.floor.unsqueeze(1)).sum(dim=-1)
    has_all = candidates.floor == -torch.inf
    covered = (keep.sum(dim=-1) <= num_certain) & ((draw.top_k >= vocab_size) | (draw.top_k <= num_certain))
    return keep, covered | has_all
