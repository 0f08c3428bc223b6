"""Updates of the block tables on the device."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_LEN = 256


@triton.jit(do_not_specialize=["num_entries"])
def _update_block_tables(
    tables_ptr,  # [R, M]
    entries_ptr,  # [n, 3]
    num_entries,
    stride_table,
    BLOCK_N: tl.constexpr,
):
    # grid: (tiles of n,)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < num_entries
    rows = tl.load(entries_ptr + 3 * offs_n, mask=mask, other=0).to(tl.int64)
    index = tl.load(entries_ptr + 3 * offs_n + 1, mask=mask, other=0)
    block_ids = tl.load(entries_ptr + 3 * offs_n + 2, mask=mask, other=0)
    tl.store(tables_ptr + rows * stride_table + index, block_ids, mask=mask)


def update_block_tables(tables: Tensor, entries: Tensor) -> None:
    """See kernels.block_tables."""
    num_entries = entries.shape[0]
    assert tables.stride(1) == 1
    assert entries.is_contiguous()
    grid = (triton.cdiv(num_entries, BLOCK_LEN),)
    _update_block_tables[grid](tables, entries, num_entries, tables.stride(0), BLOCK_N=BLOCK_LEN)
