"""Logits processors: biases, penalties and masks of allowed tokens, applied in this order before sampling.

Tensors describe them, and the ops of kernels.sampling apply them while they read logits: on a GPU, logits are neither
copied nor written. `apply_logits_processors` is the reference.

Logits may cover a rank's shard of the vocabulary, V tokens. The tensors cover the same shard, and columns beyond it
stay unchanged. Bit masks hold token t at bit ``t % 32`` of word ``t // 32``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import on_gpu
from .native import ops as cpu

WORD_BITS = 32


class Biases(NamedTuple):
    """Biases that are added to single logits; several biases of one token add up.

    Attributes:
        starts: [N + 1] int32; row n has the entries ``starts[n]:starts[n + 1]``.
        columns: [B] int32, ascending in each row.
        amounts: [B] float32; -inf forbids a token in any case.
    """

    starts: Tensor
    columns: Tensor
    amounts: Tensor


class Penalties(NamedTuple):
    """Penalties of tokens that the prompt or the output contains.

    The repetition penalty (Keskar et al., CTRL, 2019) divides positive logits of tokens of the prompt or the output
    by its factor and multiplies negative ones. Then `frequency` times the count, and `presence` once, are subtracted
    from the logits of tokens of the output.

    Attributes:
        slots: [N] int64, each row's index into `counts` and `prompt_mask`; -1: no penalties.
        counts: [R, V] int16 or int32, contiguous, count of each token in the output.
        prompt_mask: [R, ceil(V / 32)] int32, contiguous, bit mask of the tokens of the prompt.
        factors: [N, 3] float32, contiguous: repetition (above 0; 1 for none), frequency and presence (0 for none).
    """

    slots: Tensor
    counts: Tensor
    prompt_mask: Tensor
    factors: Tensor


class Masks(NamedTuple):
    """Bit masks of the allowed tokens.

    Attributes:
        slots: [N] int64, each row's index into `words`; -1: every token is allowed.
        words: [M, ceil(V / 32)] int32, contiguous; the bits of forbidden tokens are 0.
    """

    slots: Tensor
    words: Tensor


class LogitsProcessors(NamedTuple):
    """The logits processors of N rows.

    Attributes:
        num_tokens: V.
    """

    num_tokens: int
    biases: Biases
    penalties: Penalties
    masks: Masks

    @property
    def has_only_masks(self) -> bool:
        """Return whether there are neither biases nor penalties; on a GPU the host would wait for the answer."""
        if len(self.biases.amounts):
            return False
        # NumPy takes 2 us to compare 64 slots, torch 6 us.
        return not bool((self.penalties.slots.cpu().numpy() >= 0).any())


@on_gpu("process_logits")
def process_logits(
    logits: Tensor, rows: Tensor | None = None, logits_processors: LogitsProcessors | None = None
) -> Tensor:
    """Return a copy of rows of logits with their processors applied, [M, V].

    Args:
        logits: [N, V] float32.
        rows: [M] int64, selected rows; None: all N.
        logits_processors: of all N rows; None: none.
    """
    if logits_processors is not None:
        logits = apply_logits_processors(logits, logits_processors)
    return logits.clone() if rows is None else logits[rows]


def apply_logits_processors(logits: Tensor, logits_processors: LogitsProcessors) -> Tensor:
    """Return a copy of logits [N, C] float32 with all processors applied."""
    logits = logits.clone()
    _apply_biases(logits, logits_processors.biases)
    shard = logits[:, : logits_processors.num_tokens]
    _apply_penalties(shard, logits_processors.penalties)
    _apply_masks(shard, logits_processors.masks)
    return logits


def _apply_biases(logits: Tensor, biases: Biases) -> None:
    if len(biases.amounts) == 0:
        return
    rows = torch.arange(len(logits), device=logits.device)
    rows = rows.repeat_interleave(biases.starts.diff(), output_size=len(biases.amounts))
    logits.index_put_((rows, biases.columns.long()), biases.amounts, accumulate=True)


def _apply_penalties(logits: Tensor, penalties: Penalties) -> None:
    # A sequence contains few tokens of the vocabulary: 64 rows of 32,000 take 11 ms this way, and 62 ms over all
    # columns.
    penalized = (penalties.slots >= 0).nonzero().squeeze(1)
    if len(penalized) == 0:
        return
    slots = penalties.slots[penalized]
    counts = penalties.counts.index_select(0, slots)
    in_prompt = _unpack(penalties.prompt_mask.index_select(0, slots), logits.shape[1])
    index, columns = (counts.bool() | in_prompt).nonzero(as_tuple=True)
    rows, count = penalized[index], counts[index, columns]
    repetition, frequency, presence = penalties.factors[rows].unbind(1)
    values = logits[rows, columns]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count + presence * (count > 0)
    logits[rows, columns] = values


def _apply_masks(logits: Tensor, masks: Masks) -> None:
    if cpu.supports_logits(logits):
        cpu.mask_logits(logits, masks)
        return
    masked = (masks.slots >= 0).nonzero().squeeze(1)
    allowed = _unpack(masks.words.index_select(0, masks.slots[masked]), logits.shape[1])
    logits.index_copy_(0, masked, logits.index_select(0, masked).masked_fill_(~allowed, -torch.inf))


def _unpack(words: Tensor, num_bits: int) -> Tensor:
    """[N, W] int32 -> [N, num_bits] bool."""
    all_bytes = words.contiguous().view(torch.uint8).int()
    bits = _bits_of_bytes().to(words.device)[all_bytes].view(torch.bool)
    return bits[:, :num_bits]


@functools.cache
def _bits_of_bytes() -> Tensor:
    """Return a table: byte |-> its bits, lowest first, as the bytes of an int64. Ten times as fast as shifts."""
    all_bytes = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    return (all_bytes >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).view(torch.int64).flatten()
