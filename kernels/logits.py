"""What requests ask of their logits before a token is drawn: biases, penalties, and masks of what is allowed.

They are described by tensors, and the ops of kernels.sampling that read logits apply them as they read: a GPU's
logits are neither copied nor written. `apply_logits_processors` is the reference: biases, penalties, then masks.

Logits may be a rank's part of the vocabulary, V tokens; everything here is of the same part, and columns beyond it
are left as they are. Masks have a bit a token, token t at bit ``t % 32`` of word ``t // 32``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

WORD_BITS = 32


class Biases(NamedTuple):
    """What is added to single logits; several biases of one token add up.

    Attributes:
        starts: [N + 1] int32; row n has the entries ``starts[n]:starts[n + 1]``.
        columns: [B] int32, ascending in each row.
        amounts: [B] float32; -inf forbids a token, whatever else is asked.
    """

    starts: Tensor
    columns: Tensor
    amounts: Tensor


class Penalties(NamedTuple):
    """What makes tokens that were there before less likely, or more.

    The repetition penalty (Keskar et al., CTRL, 2019) divides positive logits of tokens of the prompt or the output
    and multiplies the others; then tokens of the output lose `frequency` times their count and `presence` once.

    Attributes:
        slots: [N] int64, which of the slots below each row has; -1: no penalties.
        counts: [R, V] int16 or int32, contiguous, how often each token is in the output.
        prompt_mask: [R, ceil(V / 32)] int32, contiguous, which tokens are in the prompt.
        factors: [N, 3] float32, contiguous: repetition (above 0; 1 for none), frequency and presence (0 for none).
    """

    slots: Tensor
    counts: Tensor
    prompt_mask: Tensor
    factors: Tensor


class Masks(NamedTuple):
    """What may be drawn at all.

    Attributes:
        slots: [N] int64, which of the masks each row has; -1: every token is allowed.
        words: [M, ceil(V / 32)] int32, contiguous; the bits of forbidden tokens are 0.
    """

    slots: Tensor
    words: Tensor


class LogitsProcessors(NamedTuple):
    """What N rows of logits ask for, each kind of it by some of them or by none.

    Attributes:
        num_tokens: V.
    """

    num_tokens: int
    biases: Biases
    penalties: Penalties
    masks: Masks


def apply_logits_processors(logits: Tensor, logits_processors: LogitsProcessors) -> Tensor:
    """A copy of logits [N, C] float32 with everything applied."""
    logits = logits.clone()
    _add(logits, logits_processors.biases)
    part = logits[:, : logits_processors.num_tokens]
    _penalise(part, logits_processors.penalties)
    _forbid(part, logits_processors.masks)
    return logits


def _add(logits: Tensor, biases: Biases) -> None:
    rows = torch.arange(len(logits), device=logits.device)
    rows = rows.repeat_interleave(biases.starts.diff(), output_size=len(biases.amounts))
    logits.index_put_((rows, biases.columns.long()), biases.amounts, accumulate=True)


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    # Few tokens of a vocabulary are in a sequence: 64 rows of 32,000 take 11 ms this way, 62 ms over all columns.
    members = (penalties.slots >= 0).nonzero().squeeze(1)
    slots = penalties.slots[members]
    counts = penalties.counts.index_select(0, slots)
    in_prompt = _unpack(penalties.prompt_mask.index_select(0, slots), logits.shape[1])
    index, columns = (counts.bool() | in_prompt).nonzero(as_tuple=True)
    rows, count = members[index], counts[index, columns]
    repetition, frequency, presence = penalties.factors[rows].unbind(1)
    values = logits[rows, columns]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count + presence * (count > 0)
    logits[rows, columns] = values


def _forbid(logits: Tensor, masks: Masks) -> None:
    members = (masks.slots >= 0).nonzero().squeeze(1)
    allowed = _unpack(masks.words.index_select(0, masks.slots[members]), logits.shape[1])
    logits.index_copy_(0, members, logits.index_select(0, members).masked_fill_(~allowed, -torch.inf))


def _unpack(words: Tensor, num_bits: int) -> Tensor:
    """[N, W] int32 -> [N, num_bits] bool."""
    octets = words.contiguous().view(torch.uint8).int()
    bits = _bits_of_octets().to(words.device)[octets].view(torch.bool)
    return bits[:, :num_bits]


@functools.cache
def _bits_of_octets() -> Tensor:
    """byte |-> its bits, the lowest first, as the bytes of an int64: to look them up beats shifting ten times."""
    octets = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    return (octets >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).view(torch.int64).flatten()
