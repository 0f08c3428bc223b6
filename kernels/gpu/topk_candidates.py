"""Candidates: a superset of each row's most likely tokens, found in two passes over the logits.

The first pass finds the largest value of each group of GROUP_LEN tokens. The k-th largest of these is a bound: at
least k tokens are at or above it, and few more if few of the most likely tokens share a group. The second pass
collects the tokens from the bound up. The bound of a nucleus (top_p) or of min_p is found in the same way. Bounds
need not be tight, so there may be too many candidates; callers check whether the candidates suffice and otherwise
search the whole row.

Values are compared as integers of the same order. A candidate is one int64 key, larger for more likely tokens and,
among ties, for lower ids. Probabilities are summed as integers in units of 2^-36 of the most likely token's: integer
sums do not depend on their order, so the kept tokens depend neither on tiles nor on timing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logits import EXACT, LogitsSource, find_row, load_values

# Tokens per group, and groups per program.
GROUP_LEN = 32
NUM_GROUPS = 128
# Candidates stored per row.
MAX_CANDIDATES = 1024
# Logits per program of the second pass.
BLOCK_VOCAB = 4096
# Candidates that all others are compared with per iteration.
BLOCK_OTHERS = 8
# Of 32. Further bits would tighten the bounds by less than 0.1 %.
BOUND_BITS = tl.constexpr(20)

# Less than every key, value and threshold.
NO_KEY = tl.constexpr(-(2**63))
NO_VALUE = tl.constexpr(-(2**31))


class Truncation(NamedTuple):
    """Truncation of M rows, as the argument of a kernel: see kernels.sampling; [M] each.

    Attributes:
        log_min_p: float32; -inf: off.
    """

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor


class Candidates(NamedTuple):
    """Candidates of M rows, as the argument of a kernel.

    Attributes:
        keys: [M, MAX_CANDIDATES] int64, in any order.
        counts: [M] int32, number of tokens from the bound up; only MAX_CANDIDATES of them have keys.
        bounds: [M] int32; all tokens whose ordered value is at least the bound are candidates.
        tops: [M] float32, the largest value of each row.
        totals: [M] int64, sum of all tokens' weights; only with truncation.
        log_totals: [M] float32, logsumexp of the values.
    """

    keys: Tensor
    counts: Tensor
    bounds: Tensor
    tops: Tensor
    totals: Tensor
    log_totals: Tensor


@triton.jit
def ordered_of(values):
    """Map float32 to int32 of the same order; zeros of both signs are equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(ordered):
    """Invert ordered_of; NO_VALUE becomes -inf."""
    value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(ordered == NO_VALUE, float("-inf"), value)


@triton.jit
def weights_of(values, top):
    """Return int64 weights proportional to probabilities; the most likely token has 2^36."""
    return (tl.exp(values - top) * 68719476736.0).to(tl.int64)


@triton.jit
def keys_of(ordered, columns):
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - columns.to(tl.int64))


@triton.jit
def load_keys(keys_ptr, offs, count):
    """Load the keys of candidates. Returns them with their ordered values and columns."""
    keys = tl.load(keys_ptr + offs, mask=offs < count, other=NO_KEY)
    return keys, (keys >> 32).to(tl.int32), (0xFFFFFFFF - (keys & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def rank_candidates(keys, keys_ptr, count, top, HAS_WEIGHTS: tl.constexpr, BLOCK_O: tl.constexpr):
    """Return for each candidate the number of more likely ones, [C] int32, and their total weight, [C] int64.

    Each candidate is compared with all: a row has a few dozen candidates, seldom hundreds.
    """
    ranks = tl.zeros(keys.shape, tl.int32)
    weight_before = tl.zeros(keys.shape, tl.int64)
    for start in range(0, count, BLOCK_O):
        others, ordered, _ = load_keys(keys_ptr, start + tl.arange(0, BLOCK_O), count)
        is_before = others[None, :] > keys[:, None]
        ranks += tl.sum(is_before.to(tl.int32), 1)
        if HAS_WEIGHTS:
            weights = weights_of(value_of(ordered), top)
            weight_before += tl.sum(tl.where(is_before, weights[None, :], 0), 1)
    return ranks, weight_before


@triton.jit
def _find_tops(
    source,
    group_tops_ptr,  # [M, pieces * groups]
    piece_tops_ptr,  # [M, pieces]
    piece_sums_ptr,  # [M, pieces]
    GROUP_LEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):
    # grid: (M, pieces)
    BLOCK_V: tl.constexpr = GROUP_LEN * NUM_GROUPS
    member, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_g = tl.arange(0, NUM_GROUPS)
    tile_start = piece * BLOCK_V
    # A group is a column of the tile: adjacent tokens are in different groups, so likely tokens spread.
    columns = tile_start + tl.arange(0, GROUP_LEN)[:, None] * NUM_GROUPS + offs_g[None, :]
    values = load_values(source, member, find_row(source, member), tile_start, columns, BLOCK_V)
    group_tops = tl.max(values, 0)
    top = tl.max(group_tops, 0)
    total = tl.sum(tl.sum(tl.exp(values - tl.where(top == float("-inf"), 0.0, top)), 0), 0)
    offset = member * tl.num_programs(1) + piece
    tl.store(group_tops_ptr + offset * NUM_GROUPS + offs_g, group_tops)
    tl.store(piece_tops_ptr + offset, top)
    tl.store(piece_sums_ptr + offset, total)


@triton.jit(do_not_specialize=["num_top"])
def _find_bounds(
    truncation,
    num_top,
    group_tops_ptr,  # [M, pieces * groups]
    piece_tops_ptr,  # [M, pieces]
    piece_sums_ptr,  # [M, pieces]
    candidates,
    vocab_len,
    num_pieces,
    NUM_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # grid: (M,)
    member = tl.program_id(0).to(tl.int64)
    offs_p, offs_g = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_G)
    mask_p, mask_g = offs_p < num_pieces, offs_g < num_pieces * NUM_GROUPS
    piece_tops = tl.load(piece_tops_ptr + member * num_pieces + offs_p, mask=mask_p, other=float("-inf"))
    piece_sums = tl.load(piece_sums_ptr + member * num_pieces + offs_p, mask=mask_p, other=0.0)
    top = tl.max(piece_tops, 0)
    finite_top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(piece_sums * tl.exp(piece_tops - finite_top), 0)
    group_offsets = member * num_pieces * NUM_GROUPS + offs_g
    group_tops = tl.load(group_tops_ptr + group_offsets, mask=mask_g, other=float("-inf"))

    # The bound is the largest value such that the groups from it up count, or weigh, at least `needed`.
    measures = tl.full([BLOCK_G], 1.0, tl.float32)
    needed = tl.full([], 0, tl.float32) + num_top
    lowest = tl.full([], NO_VALUE, tl.int32)
    is_bounded = True
    if truncation is not None:
        top_k, top_p = tl.load(truncation.top_k + member), tl.load(truncation.top_p + member)
        has_top_k, has_top_p = top_k < vocab_len, top_p < 1
        # These sums are rounded, so a little more than needed is requested.
        nucleus = top_p.to(tl.float32) * total * 1.001
        measures = tl.where(has_top_k, 1.0, tl.exp(group_tops - finite_top))
        needed = tl.where(has_top_k, top_k.to(tl.float32), nucleus)
        is_bounded = has_top_k | has_top_p
        # With both top_k and top_p, the nucleus depends on all of top_k's tokens.
        if (has_top_k & has_top_p) == 0:
            lowest = ordered_of(top + tl.load(truncation.log_min_p + member))
    groups = ordered_of(group_tops)
    bound = tl.full([], NO_VALUE, tl.int64)
    for bit in range(BOUND_BITS):
        threshold = bound + (tl.full([], 1, tl.int64) << (31 - bit))
        reached = tl.sum(tl.where(groups >= threshold.to(tl.int32), measures, 0.0), 0)
        bound = tl.where((reached >= needed) & is_bounded, threshold, bound)

    tl.store(candidates.bounds + member, tl.maximum(bound.to(tl.int32), lowest))
    tl.store(candidates.tops + member, finite_top)
    tl.store(candidates.log_totals + member, finite_top + tl.log(total))
    tl.store(candidates.counts + member, 0)
    tl.store(candidates.totals + member, tl.zeros([], tl.int64))


@triton.jit
def _collect(
    source,
    candidates,
    HAS_WEIGHTS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # grid: (M, pieces)
    member = tl.program_id(0).to(tl.int64)
    tile_start = tl.program_id(1) * BLOCK_V
    columns = tile_start + tl.arange(0, BLOCK_V)
    values = load_values(source, member, find_row(source, member), tile_start, columns, BLOCK_V)
    if HAS_WEIGHTS:
        weights = weights_of(values, tl.load(candidates.tops + member))
        tl.atomic_add(candidates.totals + member, tl.sum(weights, 0), sem="relaxed")
    ordered = ordered_of(values)
    is_candidate = (ordered >= tl.load(candidates.bounds + member)) & (values > float("-inf"))
    ones = is_candidate.to(tl.int32)
    num_here = tl.sum(ones, 0)
    if num_here > 0:
        first = tl.atomic_add(candidates.counts + member, num_here, sem="relaxed")
        slots = first + tl.cumsum(ones, 0) - ones
        key_ptrs = candidates.keys + member * MAX_CANDIDATES + slots
        tl.store(key_ptrs, keys_of(ordered, columns), mask=is_candidate & (slots < MAX_CANDIDATES))


def find_candidates(
    source: LogitsSource, num_rows: int, truncation: Truncation | None, num_top: int
) -> Candidates:
    """Find the candidates for truncation of each row, or for its `num_top` most likely tokens."""
    num_pieces = triton.cdiv(source.vocab_len, GROUP_LEN * NUM_GROUPS)

    def empty(dtype: torch.dtype, *lens: int) -> Tensor:
        return torch.empty((num_rows, *lens), dtype=dtype, device=source.logits.device)

    group_tops = empty(torch.float32, num_pieces * NUM_GROUPS)
    piece_tops, piece_sums = empty(torch.float32, num_pieces), empty(torch.float32, num_pieces)
    candidates = Candidates(
        keys=empty(torch.int64, MAX_CANDIDATES),
        counts=empty(torch.int32),
        bounds=empty(torch.int32),
        tops=empty(torch.float32),
        totals=empty(torch.int64),
        log_totals=empty(torch.float32),
    )
    _find_tops[(num_rows, num_pieces)](
        source, group_tops, piece_tops, piece_sums, GROUP_LEN=GROUP_LEN, NUM_GROUPS=NUM_GROUPS, num_warps=8,
        **EXACT,
    )  # fmt: skip
    _find_bounds[(num_rows,)](
        truncation, num_top, group_tops, piece_tops, piece_sums, candidates, source.vocab_len, num_pieces,
        NUM_GROUPS=NUM_GROUPS, BLOCK_G=NUM_GROUPS * triton.next_power_of_2(num_pieces),
        BLOCK_P=triton.next_power_of_2(num_pieces), num_warps=8, **EXACT,
    )  # fmt: skip
    _collect[(num_rows, triton.cdiv(source.vocab_len, BLOCK_VOCAB))](
        source, candidates, HAS_WEIGHTS=truncation is not None, MAX_CANDIDATES=MAX_CANDIDATES,
        BLOCK_V=BLOCK_VOCAB, num_warps=8, **EXACT,
    )  # fmt: skip
    return candidates
