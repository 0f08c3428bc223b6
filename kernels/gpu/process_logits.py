"""Processed logits of selected rows, for ranks that exchange them; all other kernels process logits as they read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..logits import LogitsProcessors
from .logits import EXACT, find_row, load_logits, make_source

BLOCK_VOCAB = 4096


@triton.jit
def _process_logits(
    source,
    out_ptr,  # [M, V]
    BLOCK_V: tl.constexpr,
):
    # grid: (M, tiles of V)
    member, tile_start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_V
    columns = tile_start + tl.arange(0, BLOCK_V)
    logits = load_logits(source, find_row(source, member), tile_start, columns, BLOCK_V)
    tl.store(out_ptr + member * source.vocab_len + columns, logits, mask=columns < source.vocab_len)


def process_logits(
    logits: Tensor, rows: Tensor | None = None, logits_processors: LogitsProcessors | None = None
) -> Tensor:
    """See kernels.logits. NaN becomes -inf, and +inf the largest float."""
    source, num_rows = make_source(logits, None, rows, logits_processors)
    out = torch.empty((num_rows, source.vocab_len), dtype=torch.float32, device=logits.device)
    if num_rows:
        grid = num_rows, triton.cdiv(source.vocab_len, BLOCK_VOCAB)
        _process_logits[grid](source, out, BLOCK_V=BLOCK_VOCAB, num_warps=8, **EXACT)
    return out
