"""Greedy and full-softmax sampling in one pass over the logits: the best token of each piece, then of all."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..logits import LogitsProcessors
from .gumbel import gumbel_noise
from .logits import EXACT, find_row, load_logits, make_source

# Logits per program.
BLOCK_VOCAB = 4096
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _find_best(scores, token_ids):
    """Return the largest score and the lowest token id that has it."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, token_ids, NO_TOKEN), 0)


@triton.jit
def _score_pieces(
    source,
    keys_ptr,  # [M, 2]
    scores_ptr,  # [M, pieces]
    token_ids_ptr,  # [M, pieces]
    vocab_start,
    BLOCK_V: tl.constexpr,
):
    # grid: (M, pieces)
    member, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile_start = piece * BLOCK_V
    columns = tile_start + tl.arange(0, BLOCK_V)
    scores = load_logits(source, find_row(source, member), tile_start, columns, BLOCK_V)
    token_ids = vocab_start + columns
    if keys_ptr is not None:
        temperature = tl.load(source.temperature + member)
        if temperature > 0:
            key_low, key_high = tl.load(keys_ptr + 2 * member), tl.load(keys_ptr + 2 * member + 1)
            scores = tl.div_rn(scores, temperature) + gumbel_noise(key_low, key_high, token_ids)
    best, token_id = _find_best(scores, token_ids)
    offset = member * tl.num_programs(1) + piece
    tl.store(scores_ptr + offset, best)
    tl.store(token_ids_ptr + offset, token_id)


@triton.jit
def _merge_pieces(
    scores_ptr,  # [M, pieces]
    token_ids_ptr,  # [M, pieces]
    best_ptr,  # [M]
    winners_ptr,  # [M]
    num_pieces,
    BLOCK_P: tl.constexpr,
):
    # grid: (M,)
    member = tl.program_id(0).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    offsets = member * num_pieces + offs_p
    scores = tl.load(scores_ptr + offsets, mask=offs_p < num_pieces, other=float("-inf"))
    token_ids = tl.load(token_ids_ptr + offsets, mask=offs_p < num_pieces, other=NO_TOKEN)
    best, winner = _find_best(scores, token_ids)
    tl.store(best_ptr + member, best)
    tl.store(winners_ptr + member, winner)


def sample_greedy(
    logits: Tensor,
    vocab_start: int = 0,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels.sampling."""
    return _launch(logits, None, None, vocab_start, rows, logits_processors)


def sample_full(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    vocab_start: int = 0,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels.sampling."""
    assert keys.is_contiguous()
    return _launch(logits, temperature, keys, vocab_start, rows, logits_processors)


def _launch(
    logits: Tensor,
    temperature: Tensor | None,
    keys: Tensor | None,
    vocab_start: int,
    rows: Tensor | None,
    logits_processors: LogitsProcessors | None,
) -> tuple[Tensor, Tensor]:
    source, num_rows = make_source(logits, temperature, rows, logits_processors)
    num_pieces = triton.cdiv(source.vocab_len, BLOCK_VOCAB)
    scores = logits.new_empty((num_rows, num_pieces))
    token_ids = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    best, winners = logits.new_empty(num_rows), token_ids.new_empty(num_rows)
    if num_rows:
        _score_pieces[(num_rows, num_pieces)](
            source, keys, scores, token_ids, vocab_start, BLOCK_V=BLOCK_VOCAB, num_warps=8, **EXACT
        )  # fmt: skip
        _merge_pieces[(num_rows,)](
            scores, token_ids, best, winners, num_pieces, BLOCK_P=triton.next_power_of_2(num_pieces)
        )
    return best, winners
