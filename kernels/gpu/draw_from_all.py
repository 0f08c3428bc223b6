"""Gumbel-max over whole rows of logits in one pass, each row in pieces."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gumbel import gumbel_noise

# Logits a program.
BLOCK_VOCAB = 4096


@triton.jit
def _best_of_piece(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N]
    keys_ptr,  # [N, 2]
    scores_ptr,  # [N, pieces]
    token_ids_ptr,  # [N, pieces]
    first_id,
    vocab_len,
    stride_logits,
    BLOCK_V: tl.constexpr,
):
    # grid: (N, pieces)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_v = piece * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = tl.load(logits_ptr + row * stride_logits + offs_v, mask=offs_v < vocab_len, other=float("-inf"))
    token_ids = first_id + offs_v
    noise = gumbel_noise(tl.load(keys_ptr + 2 * row), tl.load(keys_ptr + 2 * row + 1), token_ids)
    scores = logits / tl.load(temperature_ptr + row) + noise
    best = tl.max(scores, 0)
    place = row * tl.num_programs(1) + piece
    tl.store(scores_ptr + place, best)
    tl.store(token_ids_ptr + place, tl.min(tl.where(scores == best, token_ids, 0x7FFFFFFF), 0))


def draw_from_all(
    logits: Tensor, temperature: Tensor, keys: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """See kernels.sampling."""
    num_rows, vocab_len = logits.shape
    assert logits.stride(1) == 1
    assert keys.is_contiguous()
    num_pieces = triton.cdiv(vocab_len, BLOCK_VOCAB)
    scores = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=logits.device)
    token_ids = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    _best_of_piece[(num_rows, num_pieces)](
        logits, temperature, keys, scores, token_ids, first_id, vocab_len, logits.stride(0),
        BLOCK_V=BLOCK_VOCAB, num_warps=8,
    )  # fmt: skip
    best, piece = scores.max(dim=-1, keepdim=True)
    return best.squeeze(1), token_ids.gather(1, piece).squeeze(1)
