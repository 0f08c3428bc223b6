"""Sparse latent attention: an indexer chooses the tokens that a query attends to.

The indexer (DeepSeek-AI, *DeepSeek-V3.2*, 2025) is a small attention without values. Its heads share one key per
token, which is cached behind the token's latent: ``[N, 1, 1, B, C + R + I]``. The score of a token is the sum of the
heads' rectified products, each multiplied by a weight that the query has for the head. A query attends to the `top_k`
tokens with the best scores, to all of them if it has no more; then it needs no scores.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import on_gpu
from .latent_attention import gather_latents, latent_decode_attention
from .native import ops as cpu
from .native.library import is_available

# Scores in float32 at a time, except that those of one token are never divided.
SCORE_BYTES = 64 << 20
# Memory of a selection: scores, their copy without those of other tokens, and ranks and places of their width.
SELECTION_BYTES = 6 * SCORE_BYTES


class SelectedTokens(NamedTuple):
    """The tokens that each query attends to.

    Attributes:
        slots: [T, K] int32, in order of position; entries past a query's count are slots of some token.
        counts: [T] int32; 0 for padding.
    """

    slots: Tensor
    counts: Tensor


@on_gpu("index_scores")
def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    lens: Tensor,
    top_k: int,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute the indexer's scores of all tokens up to each query's own.

    Args:
        q: [T, Hi, I], rotated.
        weights: [T, Hi] float32, of the heads.
        keys: [N, 1, 1, B, I], the part of the cache with the keys, the new tokens' included.
        block_tables: [S, M] int32.
        rows: [T] int64, the sequence of each query.
        lens: [T] int32, tokens up to the query's, itself included; 0 for padding.
        top_k: queries with at most as many tokens need no scores.
        scales: [N, 1, 1, B] float32, scales of a quantized cache (see kernels.quantized_kv).

    Returns:
        [T, M * B] float32; undefined past a query's length, and for queries with at most `top_k` tokens.
    """
    if cpu.supports_rows(q, keys, q.shape[2]):
        return cpu.index_scores(q, weights.contiguous(), keys, block_tables, rows, lens, top_k, scales)
    scores = q.new_zeros(len(q), block_tables.shape[1] * keys.shape[3], dtype=torch.float32)
    lengths, first = lens.tolist(), 0
    for row, own in groupby(rows.tolist()):
        end = first + len(list(own))
        length = max(lengths[first:end])
        if length <= top_k:
            first = end
            continue
        cached = gather_latents(keys, block_tables[row], 0, length, scales, q.dtype).float()
        num_tile = max(1, SCORE_BYTES // (4 * q.shape[1] * max(length, 1)))
        for start in range(first, end, num_tile):
            tile = slice(start, min(start + num_tile, end))
            products = (q[tile].float() @ cached.mT).relu_()  # [n, Hi, L]
            scores[tile, :length] = torch.bmm(weights[tile].unsqueeze(1), products).squeeze(1)
        first = end
    return scores


def choose_tokens(scores: Tensor, lens: Tensor, top_k: int) -> Tensor:
    """Return whether each token is among those with the best scores; of equal scores at the limit the earlier ones.

    Args:
        scores: [T, L]; see index_scores, as for `lens`.
        top_k: tokens of a query at most.

    Returns:
        [T, L] bool.
    """
    if cpu.supports_logits(scores) and scores.is_contiguous():
        return cpu.choose_tokens(scores, lens, top_k)
    is_own = torch.arange(scores.shape[1], device=scores.device) < lens.unsqueeze(1)
    scores = scores.masked_fill(~is_own, -torch.inf)
    top_k = min(top_k, scores.shape[1])
    least = scores.topk(top_k, dim=1).values[:, -1:]
    is_above = scores > least
    is_equal = (scores == least) & is_own
    num_equal = top_k - is_above.sum(1, keepdim=True, dtype=torch.int32)
    is_chosen = is_above | (is_equal & (is_equal.cumsum(1, dtype=torch.int32) <= num_equal))
    return torch.where(lens.unsqueeze(1) <= top_k, is_own, is_chosen)


def slots_of(
    is_chosen: Tensor, block_tables: Tensor, rows: Tensor, block_size: int, top_k: int
) -> SelectedTokens:
    """Return chosen tokens as slots.

    Args:
        is_chosen: [T, M * B] bool, at most `top_k` of each query.
        block_tables, rows: as for index_scores.
        top_k: at most M * B.
    """
    if is_chosen.is_cpu and is_available():
        return SelectedTokens(*cpu.chosen_slots(is_chosen, block_tables, rows, block_size, top_k))
    positions = torch.arange(is_chosen.shape[1], device=is_chosen.device)
    ranks = is_chosen.cumsum(1, dtype=torch.int32)
    # The positions that are not chosen are written behind the others, where nothing reads them.
    places = torch.where(is_chosen, ranks - 1, top_k).long()
    chosen = positions.new_zeros(len(is_chosen), top_k + 1)
    chosen = chosen.scatter_(1, places, positions.expand_as(places))[:, :top_k]
    blocks = block_tables[rows.unsqueeze(1), chosen // block_size]
    return SelectedTokens((blocks * block_size + chosen % block_size).int(), ranks[:, -1].contiguous())


@on_gpu("sparse_latent")
def sparse_latent_attention(
    q: Tensor,
    latents: Tensor,
    slots: Tensor,
    counts: Tensor,
    scale: float,
    value_dim: int,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute the absorbed attention of each query to its selected tokens.

    Args:
        q: [T, Hq, D]; see latent_decode_attention, as for the other arguments.
        slots, counts: of SelectedTokens.

    Returns:
        [T, Hq, C], the weighted sums of latents; undefined where a count is 0.
    """
    # Each slot is a block of one token.
    tokens = latents.flatten(0, 3)[:, None, None, None]
    token_scales = None if scales is None else scales.view(-1, 1, 1, 1)
    return latent_decode_attention(q, tokens, slots, counts, scale, value_dim, None, token_scales)
