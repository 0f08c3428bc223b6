"""Tiles of logits with logits processors (kernels.logits) and temperature applied as they are read."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..logits import LogitsProcessors

# Launch options of every kernel that reads logits: a fused multiply-add rounds once where the reference rounds twice,
# and kernels compiled for different batches would fuse differently.
EXACT = {"enable_fp_fusion": False}

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


class LogitsSource(NamedTuple):
    """Rows of logits, as the argument of a kernel.

    Attributes:
        logits: [N, V] float32.
        rows: [M] int64, selected rows; None: all N.
        temperature: [M] float32; None: 1.
        logits_processors: of all N rows; None: none.
    """

    logits: Tensor
    rows: Tensor | None
    temperature: Tensor | None
    logits_processors: LogitsProcessors | None
    vocab_len: int
    stride: int


def make_source(
    logits: Tensor,
    temperature: Tensor | None,
    rows: Tensor | None,
    logits_processors: LogitsProcessors | None,
) -> tuple[LogitsSource, int]:
    """Check the arguments. Returns the source and its number of rows."""
    assert logits.stride(1) == 1
    if logits_processors is not None:
        assert logits_processors.penalties.counts.is_contiguous()
        assert logits_processors.penalties.prompt_mask.is_contiguous()
        assert logits_processors.penalties.factors.is_contiguous()
        assert logits_processors.masks.words.is_contiguous()
    source = LogitsSource(logits, rows, temperature, logits_processors, logits.shape[1], logits.stride(0))
    return source, len(logits) if rows is None else len(rows)


@triton.jit
def find_row(source, member):
    """Return the row of the logits of a selected row `member`, int64."""
    if source.rows is not None:
        member = tl.load(source.rows + member)
    return member


@triton.jit
def load_logits(source, row, tile_start, columns, TILE_LEN: tl.constexpr):
    """Load processed logits of a row at `columns` of any shape, within TILE_LEN from `tile_start`.

    Columns beyond the vocabulary are -inf. NaN becomes -inf, and +inf the largest float, so that all are comparable.
    """
    mask = columns < source.vocab_len
    logits = tl.load(source.logits + row * source.stride + columns, mask=mask, other=float("-inf"))
    if source.logits_processors is not None:
        logits_processors = source.logits_processors
        logits = _apply_biases(
            logits, columns, row, tile_start, tile_start + TILE_LEN, logits_processors.biases
        )
        logits = _apply_penalties(
            logits, columns, row, logits_processors.num_tokens, logits_processors.penalties
        )
        logits = _apply_masks(logits, columns, row, logits_processors.num_tokens, logits_processors.masks)
    return tl.where(logits == logits, tl.minimum(logits, LARGEST_FLOAT), float("-inf"))


@triton.jit
def load_values(source, member, row, tile_start, columns, TILE_LEN: tl.constexpr):
    """As load_logits, divided by the temperature and rounded like the reference."""
    values = load_logits(source, row, tile_start, columns, TILE_LEN)
    if source.temperature is not None:
        temperature = tl.load(source.temperature + member)
        values = tl.minimum(tl.div_rn(values, temperature), LARGEST_FLOAT)
    return values


@triton.jit
def _apply_biases(logits, columns, row, start, end, biases):
    """Add the row's biases of columns `start` to `end`, one at a time."""
    entry = tl.load(biases.starts + row)
    end_entry = tl.load(biases.starts + row + 1)
    high = end_entry
    while entry < high:
        middle = (entry + high) // 2
        is_before = tl.load(biases.columns + middle) < start
        entry = tl.where(is_before, middle + 1, entry)
        high = tl.where(is_before, high, middle)
    column = tl.load(biases.columns + entry, mask=entry < end_entry, other=end)
    while column < end:
        logits += tl.where(columns == column, tl.load(biases.amounts + entry), 0.0)
        entry += 1
        column = tl.load(biases.columns + entry, mask=entry < end_entry, other=end)
    return logits


@triton.jit
def _apply_penalties(logits, columns, row, num_tokens, penalties):
    slot = tl.load(penalties.slots + row)
    if slot >= 0:
        mask = columns < num_tokens
        repetition = tl.load(penalties.factors + 3 * row)
        frequency = tl.load(penalties.factors + 3 * row + 1)
        presence = tl.load(penalties.factors + 3 * row + 2)
        count = tl.load(penalties.counts + slot * num_tokens + columns, mask=mask, other=0).to(tl.float32)
        in_output = count > 0
        is_repeated = in_output | _load_bits(penalties.prompt_mask, slot, columns, num_tokens)
        factor = tl.where(is_repeated, repetition, 1.0)
        logits = tl.where(logits > 0, tl.div_rn(logits, factor), logits * factor)
        logits -= frequency * count + tl.where(in_output, presence, 0.0)
    return logits


@triton.jit
def _apply_masks(logits, columns, row, num_tokens, masks):
    slot = tl.load(masks.slots + row)
    if slot >= 0:
        is_allowed = _load_bits(masks.words, slot, columns, num_tokens) | (columns >= num_tokens)
        logits = tl.where(is_allowed, logits, float("-inf"))
    return logits


@triton.jit
def _load_bits(words_ptr, slot, columns, num_tokens):
    """Load the bits of columns of a mask of num_tokens bits; False beyond it."""
    word_ptrs = words_ptr + slot * tl.cdiv(num_tokens, 32) + columns // 32
    words = tl.load(word_ptrs, mask=columns < num_tokens, other=0)
    return ((words >> (columns % 32)) & 1) == 1
