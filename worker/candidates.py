"""Candidates: the likeliest tokens of rows that draw, what top_k, top_p and min_p leave of them, and the draw.

Each cut keeps a prefix of the tokens sorted by likelihood. They apply in this order, to probabilities after
temperature, as in transformers: top_p counts within what top_k leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.gumbel import gumbel_noise


@dataclass(frozen=True, slots=True)
class Draw:
    """Settings of rows that draw, [N, 1] each, and their keys, [N, 2] int32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor

    def select(self, rows: Tensor) -> Draw:
        return Draw(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.keys[rows]
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens to draw from, likeliest first and equals by id.

    Attributes:
        values: [N, K] float32, logits over temperature.
        token_ids: [N, K] int32.
        floor: [N, 1]; every token above it is among the candidates. -inf if all tokens are.
        log_total: [N, 1], log of the sum of exp over the whole vocabulary.
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


def kept_candidates(candidates: Candidates, draw: Draw, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Which candidates the cuts leave, [N, K] bool, and for which rows that is the exact answer, [N] bool."""
    values = candidates.values
    in_top_k = torch.arange(values.shape[1], device=values.device) < draw.top_k
    cuts_k = draw.top_k < vocab_size
    of_top_k = values.masked_fill(~in_top_k, -torch.inf).logsumexp(dim=-1, keepdim=True)
    probabilities = (values - torch.where(cuts_k, of_top_k, candidates.log_total)).double().exp()
    likelier = probabilities.cumsum(dim=-1) - probabilities
    keep = in_top_k & (likelier < draw.top_p) & (values >= values[:, :1] + draw.min_p.log())
    keep &= values > -torch.inf
    keep[:, 0] = True
    num_certain = (values > candidates.floor).sum(dim=-1, keepdim=True)
    has_all = candidates.floor == -torch.inf
    covered = (keep.sum(dim=-1, keepdim=True) <= num_certain) & (~cuts_k | (draw.top_k <= num_certain))
    return keep, (covered | has_all).squeeze(1)


def draw_among(candidates: Candidates, keep: Tensor, draw: Draw) -> Tensor:
    """Draws from the softmax of the kept candidates by Gumbel-max: token ids, [N] int32."""
    noise = gumbel_noise(draw.keys, candidates.token_ids)
    scores = noise.add_(candidates.values).masked_fill_(~keep, -torch.inf)
    return candidates.token_ids.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)
