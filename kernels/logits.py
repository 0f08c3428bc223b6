"""What a request asks of its logits before a token is drawn: penalties, biases, and a mask of what is allowed.

Each changes a step's logits in place. Logits may be a rank's part of the vocabulary: their first column is token
`vocab_start`, everything else is of the whole vocabulary, and columns beyond it are left as they are.

Masks have a bit a token, token t at bit ``t % 32`` of word ``t // 32``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .dispatch import on_gpu

WORD_BITS = 32


@on_gpu("logits")
def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    prompt_mask: Tensor,
    row_index: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    vocab_start: int = 0,
) -> None:
    """Makes tokens that were there before less likely, or more.

    The repetition penalty (Keskar et al., CTRL, 2019) divides positive logits of tokens of the prompt or the output
    and multiplies the others; then tokens of the output lose `frequency` times their count and `presence` once.

    Args:
        logits: [N, C] float32.
        counts: [R, V] int16 or int32, how often each token is in the output of persistent row r.
        prompt_mask: [R, ceil(V / 32)] int32, which tokens are in the prompt.
        row_index: [N] int64, the persistent row of each row of logits.
        repetition: [N] float32, above 0; 1 for none.
        frequency, presence: [N] float32; 0 for none.
    """
    # Few tokens of a vocabulary are in a sequence: 64 rows of 32,000 take 11 ms this way, 62 ms over all columns.
    num_columns = min(logits.shape[1], counts.shape[1] - vocab_start)
    counts = counts[:, vocab_start : vocab_start + num_columns].index_select(0, row_index)
    in_prompt = _unpack(prompt_mask.index_select(0, row_index), vocab_start, num_columns)
    rows, columns = (counts.bool() | in_prompt).nonzero(as_tuple=True)
    values, count, factor = logits[rows, columns], counts[rows, columns], repetition[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= frequency[rows] * count + presence[rows] * (count > 0)
    logits[rows, columns] = values


@on_gpu("logits")
def apply_bias(
    logits: Tensor, index_rows: Tensor, token_ids: Tensor, values: Tensor, vocab_start: int = 0
) -> None:
    """Adds to single logits, several times to one that is named several times.

    Args:
        logits: [N, C] float32.
        index_rows: [B] int64, rows of `logits`.
        token_ids: [B] int64; entries whose token has no column here, -1 among them, are padding.
        values: [B] float32; -inf forbids a token.
    """
    columns = token_ids - vocab_start
    mine = (columns >= 0) & (columns < logits.shape[1])
    places = index_rows.where(mine, 0), columns.where(mine, 0)
    logits.index_put_(places, values.where(mine, 0.0), accumulate=True)


@on_gpu("logits")
def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor, vocab_start: int = 0) -> None:
    """Forbids, with -inf, the tokens whose bit is 0.

    Args:
        logits: [N, C] float32.
        bitmask: [N, ceil(V / 32)] int32, row n for row n of `logits`.
        rows: [M] int64, the rows that have a mask, each once; -1 is padding.
    """
    rows = rows[rows >= 0]
    num_columns = min(logits.shape[1], bitmask.shape[1] * WORD_BITS - vocab_start)
    allowed = _unpack(bitmask.index_select(0, rows), vocab_start, num_columns)
    part = logits[:, :num_columns]
    part.index_copy_(0, rows, part.index_select(0, rows).masked_fill_(~allowed, -torch.inf))


def _unpack(words: Tensor, first_bit: int, num_bits: int) -> Tensor:
    """[N, W] int32 -> [N, num_bits] bool, the bits from `first_bit` on."""
    first_word, skipped = divmod(first_bit, WORD_BITS)
    words = words[:, first_word : -(-(first_bit + num_bits) // WORD_BITS)]
    octets = words.contiguous().view(torch.uint8).int()
    bits = _bits_of_octets().to(words.device)[octets].view(torch.bool)
    return bits[:, skipped : skipped + num_bits]


@functools.cache
def _bits_of_octets() -> Tensor:
    """byte |-> its bits, the lowest first, as the bytes of an int64: to look them up beats shifting ten times."""
    octets = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    return (octets >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).view(torch.int64).flatten()
