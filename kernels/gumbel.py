"""Gumbel noise from a counter-based generator: a pure function of (seed, position, token id).

The argmax of logits plus standard Gumbel noise is a sample of their softmax (the Gumbel-max trick; Gumbel, 1954). No
number depends on the position of a row or a token in the batch or on a rank, so a sequence's tokens do not either.

Integer operations wrap at 32 or 64 bits, so that a kernel can repeat them bit for bit:

- a row's key: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) at step `position` of the stream of `seed`, split
  into two 32-bit halves;
- a token's bits: the two-round xor-shift-multiply hash ``lowbias32`` (Wellons, *Hash Prospector*, with the
  improved constants listed there) of ``token_id * golden_ratio + key[0]``, with key[1] mixed in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import on_gpu

_GOLDEN_64 = 0x9E3779B97F4A7C15
_GOLDEN_32 = 0x9E3779B9


@on_gpu("gumbel")
def random_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the keys of the noise of each row.

    Args:
        seeds: [N] int64.
        positions: [N] int64, index of the sampled token in its sequence.

    Returns:
        [N, 2] int32.
    """
    x = seeds + (positions + 1) * _signed(_GOLDEN_64, 64)
    x = (x ^ _shift_right(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shift_right(x, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    x = x ^ _shift_right(x, 31, 64)
    return x.view(torch.int32).view(-1, 2)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return independent standard Gumbel noise for each row and token.

    Args:
        keys: [N, 2] int32, from random_keys.
        token_ids: [N, C] or [1, C] int32.

    Returns:
        [N, C] float32.
    """
    x = token_ids * _signed(_GOLDEN_32, 32) + keys[:, :1]
    x ^= _shift_right(x, 16, 32)
    x *= _signed(0x21F0AAAD, 32)
    x ^= keys[:, 1:]
    x ^= _shift_right(x, 15, 32)
    x *= _signed(0xD35A2D97, 32)
    x ^= _shift_right(x, 15, 32)
    # -log(-log(1 - v)) of a uniform v in (0, 1): the largest noise has v near 0, where float32 is most precise.
    v = (x & 0x7FFFFFFF).float().add_(0.5).mul_(2**-31).clamp_(max=1 - 2**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def _signed(constant: int, bits: int) -> int:
    """Return the signed integer with the same bits."""
    return constant - (1 << bits) if constant >> (bits - 1) else constant


def _shift_right(x: Tensor, count: int, bits: int) -> Tensor:
    """Shift logically: torch shifts signed integers arithmetically."""
    return (x >> count).bitwise_and_((1 << (bits - count)) - 1)
