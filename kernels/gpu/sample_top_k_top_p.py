"""Exact top_k, top_p and min_p in two passes over the logits, without a sort.

A row samples from its candidates (kernels.gpu.topk_candidates). A row that keeps more tokens than there are
candidates, as with a wide nucleus, searches all tokens for its threshold (kernels.gpu.radix_threshold).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..logits import LogitsProcessors
from . import topk_candidates
from .gumbel import gumbel_noise
from .logits import EXACT, find_row, load_values, make_source
from .radix_threshold import (
    BLOCK_VOCAB,
    HISTOGRAM_LEN,
    find_threshold,
    keep_tile,
    make_histograms,
    weigh_above,
)
from .topk_candidates import (
    BLOCK_OTHERS,
    NO_VALUE,
    Truncation,
    find_candidates,
    load_keys,
    ordered_of,
    rank_candidates,
    value_of,
    weights_of,
)

ALL_TIES = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _sample_from_candidates(
    candidates,
    truncation,
    keys_ptr,  # [M, 2]
    token_ids_ptr,  # [M]
    suffices_ptr,  # [M]
    vocab_len,
    MAX_CANDIDATES: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    # grid: (M,)
    member = tl.program_id(0).to(tl.int64)
    count, top = tl.load(candidates.counts + member), tl.load(candidates.tops + member)
    top_k, top_p = tl.load(truncation.top_k + member), tl.load(truncation.top_p + member)
    lowest = ordered_of(top + tl.load(truncation.log_min_p + member))
    if count > MAX_CANDIDATES:
        tl.store(suffices_ptr + member, 0)
        return
    row_keys_ptr = candidates.keys + member * MAX_CANDIDATES
    offs_c = tl.arange(0, MAX_CANDIDATES)
    keys, ordered, token_ids = load_keys(row_keys_ptr, offs_c, count)
    values = value_of(ordered)
    weights = weights_of(values, top)
    ranks, weight_before = rank_candidates(keys, row_keys_ptr, count, top, True, BLOCK_O)

    is_live = offs_c < count
    has_top_k, has_top_p = top_k < vocab_len, top_p < 1
    in_top_k = is_live & (ranks < top_k)
    total = tl.sum(tl.where(in_top_k, weights, 0), 0)
    needed = tl.where(has_top_k, total, tl.load(candidates.totals + member))
    needed = tl.ceil(tl.minimum(top_p, 1.0) * needed.to(tl.float64)).to(tl.int64)
    # A nucleus may end below the bound, where candidates are unknown, unless min_p ends it above.
    ends_here = (total >= needed) | (tl.load(candidates.bounds + member) <= lowest)
    tl.store(suffices_ptr + member, (has_top_k | (has_top_p == 0) | ends_here).to(tl.int32))

    keep = in_top_k & ((weight_before < needed) | (has_top_p == 0)) & (ordered >= lowest)
    keep |= is_live & (ranks == 0)
    key_low, key_high = tl.load(keys_ptr + 2 * member), tl.load(keys_ptr + 2 * member + 1)
    scores = tl.where(keep, values + gumbel_noise(key_low, key_high, token_ids), float("-inf"))
    winners = tl.where(keep & (scores == tl.max(scores, 0)), token_ids, vocab_len)
    winner = tl.min(winners, 0)
    # All tokens may be masked or NaN.
    tl.store(token_ids_ptr + member, tl.where(winner < vocab_len, winner, 0))


@triton.jit
def _find_kept(
    source, member, row, top, truncation, histograms_ptr, BLOCK_V: tl.constexpr, LEN: tl.constexpr
):
    """Return the threshold above which all tokens are kept, and the number of kept tokens at the threshold."""
    top_k, top_p = tl.load(truncation.top_k + member).to(tl.int64), tl.load(truncation.top_p + member)
    threshold = tl.full([], NO_VALUE, tl.int32)
    num_ties = tl.full([], ALL_TIES, tl.int64)
    if top_k < source.vocab_len:
        threshold, num_above = find_threshold(
            source, member, row, top, top_k, histograms_ptr, True, BLOCK_V, LEN
        )
        num_ties = top_k - num_above
    if top_p < 1:
        kept = weigh_above(source, member, row, top, threshold, BLOCK_V)
        if top_k < source.vocab_len:
            kept += num_ties * weights_of(value_of(threshold), top)
        needed = tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64)
        nucleus, weight_above = find_threshold(
            source, member, row, top, needed, histograms_ptr, False, BLOCK_V, LEN
        )
        missing = needed - weight_above
        weight = tl.maximum(weights_of(value_of(nucleus), top), 1)
        num_nucleus_ties = (missing + weight - 1) // weight
        if nucleus == threshold:
            num_ties = tl.minimum(num_ties, num_nucleus_ties)
        elif nucleus > threshold:
            threshold = nucleus
            num_ties = num_nucleus_ties
    lowest = ordered_of(top + tl.load(truncation.log_min_p + member))
    if lowest > threshold:
        threshold = lowest
        num_ties = tl.full([], ALL_TIES, tl.int64)
    return threshold, num_ties


@triton.jit
def _sample_from_rows(
    source,
    tops_ptr,  # [M]
    truncation,
    keys_ptr,  # [M, 2]
    token_ids_ptr,  # [M]
    suffices_ptr,  # [M]
    histograms_ptr,  # [M, LEN]
    BLOCK_V: tl.constexpr,
    LEN: tl.constexpr,
):
    # grid: (M,)
    member = tl.program_id(0).to(tl.int64)
    if tl.load(suffices_ptr + member) != 0:
        return
    row = find_row(source, member)
    top = tl.load(tops_ptr + member)
    threshold, num_ties = _find_kept(source, member, row, top, truncation, histograms_ptr, BLOCK_V, LEN)
    key_low, key_high = tl.load(keys_ptr + 2 * member), tl.load(keys_ptr + 2 * member + 1)
    best = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], 0, tl.int32)
    ties_before = tl.zeros([], tl.int64)
    for tile_start in range(0, source.vocab_len, BLOCK_V):
        token_ids = tile_start + tl.arange(0, BLOCK_V)
        values = load_values(source, member, row, tile_start, token_ids, BLOCK_V)
        keep, ties_before = keep_tile(ordered_of(values), threshold, num_ties, ties_before)
        scores = tl.where(keep, values + gumbel_noise(key_low, key_high, token_ids), float("-inf"))
        best_here = tl.max(scores, 0)
        winner_here = tl.min(tl.where(scores == best_here, token_ids, 0x7FFFFFFF), 0)
        winner = tl.where(best_here > best, winner_here, winner)
        best = tl.maximum(best, best_here)
    tl.store(token_ids_ptr + member, winner)


def sample_top_k_top_p(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> Tensor:
    """See kernels.sampling."""
    source, num_rows = make_source(logits, temperature, rows, logits_processors)
    assert keys.is_contiguous()
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return token_ids
    suffices = torch.empty_like(token_ids)
    truncation = Truncation(top_k, top_p, min_p.log())
    candidates = find_candidates(source, num_rows, truncation, 0)
    _sample_from_candidates[(num_rows,)](
        candidates, truncation, keys, token_ids, suffices, source.vocab_len,
        MAX_CANDIDATES=topk_candidates.MAX_CANDIDATES, BLOCK_O=BLOCK_OTHERS, num_warps=8, **EXACT,
    )  # fmt: skip
    _sample_from_rows[(num_rows,)](
        source, candidates.tops, truncation, keys, token_ids, suffices,
        make_histograms(num_rows, logits.device), BLOCK_V=BLOCK_VOCAB, LEN=HISTOGRAM_LEN, num_warps=8, **EXACT,
    )  # fmt: skip
    return token_ids
