"""The most likely tokens of each row in order, and the logsumexp of the row, in two passes over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import sampling
from ..dispatch import twin_of
from ..logits import LogitsProcessors
from . import topk_candidates
from .logits import EXACT, find_row, load_values, make_source
from .radix_threshold import BLOCK_VOCAB, HISTOGRAM_LEN, find_threshold, keep_tile, make_histograms
from .topk_candidates import (
    BLOCK_OTHERS,
    find_candidates,
    keys_of,
    load_keys,
    ordered_of,
    rank_candidates,
    value_of,
)


# Requests choose any num_top; specialization for divisible values gains nothing.
@triton.jit(do_not_specialize=["num_top"])
def _collect_from_rows(
    source,
    candidates,
    histograms_ptr,  # [M, LEN]
    num_top,
    MAX_CANDIDATES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LEN: tl.constexpr,
):
    """Collect exactly `num_top` tokens for rows with too many candidates, as many ties cause."""
    # grid: (M,)
    member = tl.program_id(0).to(tl.int64)
    if tl.load(candidates.counts + member) <= MAX_CANDIDATES:
        return
    row, top = find_row(source, member), tl.load(candidates.tops + member)
    threshold, num_above = find_threshold(
        source, member, row, top, num_top, histograms_ptr, True, BLOCK_V, LEN
    )
    num_ties = num_top - num_above
    ties_before = tl.zeros([], tl.int64)
    first = tl.zeros([], tl.int32)
    for tile_start in range(0, source.vocab_len, BLOCK_V):
        columns = tile_start + tl.arange(0, BLOCK_V)
        values = load_values(source, member, row, tile_start, columns, BLOCK_V)
        ordered = ordered_of(values)
        keep, ties_before = keep_tile(ordered, threshold, num_ties, ties_before)
        ones = keep.to(tl.int32)
        key_ptrs = candidates.keys + member * MAX_CANDIDATES + first + tl.cumsum(ones, 0) - ones
        tl.store(key_ptrs, keys_of(ordered, columns), mask=keep)
        first += tl.sum(ones, 0)
    tl.store(candidates.counts + member, num_top)


@triton.jit(do_not_specialize=["num_top"])
def _store_in_order(
    candidates,
    values_ptr,  # [M, K]
    columns_ptr,  # [M, K]
    num_top,
    MAX_CANDIDATES: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    # grid: (M,)
    member = tl.program_id(0).to(tl.int64)
    count = tl.load(candidates.counts + member)
    row_keys_ptr = candidates.keys + member * MAX_CANDIDATES
    offs_c = tl.arange(0, MAX_CANDIDATES)
    keys, ordered, columns = load_keys(row_keys_ptr, offs_c, count)
    ranks, _ = rank_candidates(keys, row_keys_ptr, count, 0.0, False, BLOCK_O)
    # Missing candidates come last.
    is_live = offs_c < count
    positions = tl.where(is_live, ranks, offs_c)
    mask = positions < num_top
    tl.store(values_ptr + member * num_top + positions, value_of(ordered), mask=mask)
    tl.store(columns_ptr + member * num_top + positions, tl.where(is_live, columns, 0), mask=mask)


def topk_tokens(
    logits: Tensor,
    num_top: int,
    temperature: Tensor | None = None,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.sampling; ties come by id, and a token of -inf as -inf in column 0.

    More tokens than there are candidates are selected by PyTorch, with ties in any order.
    """
    if num_top > topk_candidates.MAX_CANDIDATES:
        return twin_of(sampling.topk_tokens)(logits, num_top, temperature, rows, logits_processors)
    source, num_rows = make_source(logits, temperature, rows, logits_processors)
    assert num_top <= source.vocab_len
    values = torch.empty((num_rows, num_top), dtype=torch.float32, device=logits.device)
    columns = torch.empty((num_rows, num_top), dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return values, columns, values.new_empty(0)
    candidates = find_candidates(source, num_rows, None, max(1, num_top))
    if num_top > 0:
        _collect_from_rows[(num_rows,)](
            source, candidates, make_histograms(num_rows, logits.device), num_top,
            MAX_CANDIDATES=topk_candidates.MAX_CANDIDATES, BLOCK_V=BLOCK_VOCAB, LEN=HISTOGRAM_LEN, num_warps=8,
            **EXACT,
        )  # fmt: skip
        _store_in_order[(num_rows,)](
            candidates, values, columns, num_top, MAX_CANDIDATES=topk_candidates.MAX_CANDIDATES,
            BLOCK_O=BLOCK_OTHERS, num_warps=8,
        )  # fmt: skip
    return values, columns, candidates.log_totals
