"""Block tables on the device, a launch an op."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_LEN = 256


@triton.jit
def _put_entries(
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


@triton.jit
def _map_slots(
    tables_ptr,  # [R, M]
    rows_ptr,  # [T]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    num_tokens,
    stride_table,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # grid: (tiles of T,)
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = offs_t < num_tokens
    rows = tl.load(rows_ptr + offs_t, mask=mask, other=0)
    positions = tl.load(positions_ptr + offs_t, mask=mask, other=0)
    entry_ptrs = tables_ptr + rows * stride_table + positions // CACHE_BLOCK
    block_ids = tl.load(entry_ptrs, mask=mask, other=0).to(tl.int64)
    tl.store(slots_ptr + offs_t, block_ids * CACHE_BLOCK + positions % CACHE_BLOCK, mask=mask)


def put_entries(tables: Tensor, entries: Tensor) -> None:
    """See kernels.block_tables."""
    num_entries = entries.shape[0]
    assert tables.stride(1) == 1
    assert entries.is_contiguous()
    grid = (triton.cdiv(num_entries, BLOCK_LEN),)
    _put_entries[grid](tables, entries, num_entries, tables.stride(0), BLOCK_N=BLOCK_LEN)


def map_slots(tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """See kernels.block_tables."""
    num_tokens = rows.shape[0]
    assert tables.stride(1) == rows.stride(0) == positions.stride(0) == 1
    slots = torch.empty(num_tokens, dtype=torch.int64, device=rows.device)
    _map_slots[(triton.cdiv(num_tokens, BLOCK_LEN),)](
        tables,
        rows,
        positions,
        slots,
        num_tokens,
        tables.stride(0),
        CACHE_BLOCK=block_size,
        BLOCK_T=BLOCK_LEN,
    )
    return slots
