"""Penalties, biases and masks of logits, a launch and at most one pass over the logits each."""

import triton
import triton.language as tl
from torch import Tensor

# Logits, or entries of a bias, a program.
BLOCK_VOCAB = 2048
BLOCK_ENTRIES = 256


@triton.jit
def _load_bits(words_ptr, token_ids, mask):
    """The bits of tokens, [C] bool; False where masked."""
    words = tl.load(words_ptr + token_ids // 32, mask=mask, other=0)
    return ((words >> (token_ids % 32)) & 1) == 1


@triton.jit
def _apply_penalties(
    logits_ptr,  # [N, C]
    counts_ptr,  # [R, V]
    prompt_mask_ptr,  # [R, V / 32]
    row_index_ptr,  # [N]
    repetition_ptr,  # [N]
    frequency_ptr,  # [N]
    presence_ptr,  # [N]
    vocab_start,
    num_columns,
    stride_logits,
    stride_counts,
    stride_prompt_mask,
    BLOCK_V: tl.constexpr,
):
    # grid: (N, tiles of C)
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = columns < num_columns
    token_ids = vocab_start + columns
    persistent_row = tl.load(row_index_ptr + row)
    count = tl.load(counts_ptr + persistent_row * stride_counts + token_ids, mask=mask, other=0).to(
        tl.float32
    )
    in_prompt = _load_bits(prompt_mask_ptr + persistent_row * stride_prompt_mask, token_ids, mask)
    logits_ptrs = logits_ptr + row * stride_logits + columns
    logits = tl.load(logits_ptrs, mask=mask, other=0.0)
    in_output = count > 0
    factor = tl.where(in_output | in_prompt, repetition, 1.0)
    logits = tl.where(logits > 0, logits / factor, logits * factor)
    logits -= frequency * count + tl.where(in_output, presence, 0.0)
    tl.store(logits_ptrs, logits, mask=mask)


@triton.jit
def _apply_bias(
    logits_ptr,  # [N, C]
    index_rows_ptr,  # [B]
    token_ids_ptr,  # [B]
    values_ptr,  # [B]
    vocab_start,
    num_columns,
    num_entries,
    stride_logits,
    BLOCK_B: tl.constexpr,
):
    # grid: (tiles of B,)
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = offs_b < num_entries
    columns = tl.load(token_ids_ptr + offs_b, mask=mask, other=-1) - vocab_start
    mask &= (columns >= 0) & (columns < num_columns)
    rows = tl.load(index_rows_ptr + offs_b, mask=mask, other=0)
    values = tl.load(values_ptr + offs_b, mask=mask, other=0.0)
    tl.atomic_add(logits_ptr + rows * stride_logits + columns, values, mask=mask)


@triton.jit
def _apply_bitmask(
    logits_ptr,  # [N, C]
    bitmask_ptr,  # [N, V / 32]
    rows_ptr,  # [M]
    vocab_start,
    num_columns,
    stride_logits,
    stride_bitmask,
    BLOCK_V: tl.constexpr,
):
    # grid: (M, tiles of C)
    row = tl.load(rows_ptr + tl.program_id(0))
    if row < 0:
        return
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = columns < num_columns
    allowed = _load_bits(bitmask_ptr + row * stride_bitmask, vocab_start + columns, mask)
    # Nothing is read: forbidden logits are overwritten, and the others stay.
    minus_inf = tl.full([BLOCK_V], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * stride_logits + columns, minus_inf, mask=mask & ~allowed)


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
    """See kernels.logits; rows that ask for no penalty are not read."""
    assert logits.stride(1) == counts.stride(1) == prompt_mask.stride(1) == 1
    num_columns = min(logits.shape[1], counts.shape[1] - vocab_start)
    _apply_penalties[(len(logits), triton.cdiv(num_columns, BLOCK_VOCAB))](
        logits, counts, prompt_mask, row_index, repetition, frequency, presence, vocab_start, num_columns,
        logits.stride(0), counts.stride(0), prompt_mask.stride(0), BLOCK_V=BLOCK_VOCAB, num_warps=8,
    )  # fmt: skip


def apply_bias(
    logits: Tensor, index_rows: Tensor, token_ids: Tensor, values: Tensor, vocab_start: int = 0
) -> None:
    """See kernels.logits; the order in which biases of one token are added is not fixed."""
    assert logits.stride(1) == index_rows.stride(0) == token_ids.stride(0) == values.stride(0) == 1
    num_entries = len(values)
    _apply_bias[(triton.cdiv(num_entries, BLOCK_ENTRIES),)](
        logits, index_rows, token_ids, values, vocab_start, logits.shape[1], num_entries, logits.stride(0),
        BLOCK_B=BLOCK_ENTRIES,
    )  # fmt: skip


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor, vocab_start: int = 0) -> None:
    """See kernels.logits."""
    assert logits.stride(1) == bitmask.stride(1) == 1
    num_columns = min(logits.shape[1], bitmask.shape[1] * 32 - vocab_start)
    _apply_bitmask[(len(rows), triton.cdiv(num_columns, BLOCK_VOCAB))](
        logits, bitmask, rows, vocab_start, num_columns, logits.stride(0), bitmask.stride(0),
        BLOCK_V=BLOCK_VOCAB, num_warps=8,
    )  # fmt: skip
