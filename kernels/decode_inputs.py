"""Inputs of the tokens that decoding rows compute, gathered from the tokens and block tables of the rows on a CPU."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .native import decode_inputs as native
from .native.library import is_available, library

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


class RowTables:
    """Tokens and block tables of R rows (batch slots). Their owner changes the numbers, and keeps the memory.

    Args:
        token_ids: [R, L] int32, known tokens and drafted ones behind them.
        lens: [R] int32, known tokens.
        block_tables: [R, M] int32.
    """

    def __init__(self, token_ids: Tensor, lens: IntArray, block_tables: Tensor, block_size: int) -> None:
        assert token_ids.dtype == block_tables.dtype == torch.int32
        assert token_ids.is_contiguous()
        assert block_tables.is_contiguous()
        self.token_ids, self.lens = token_ids, lens
        self.block_tables, self.block_size = block_tables, block_size
        self.native = native.RowTables(
            token_ids.data_ptr(), lens.ctypes.data, block_tables.data_ptr(), token_ids.stride(0),
            block_tables.stride(0), block_size,
        )  # fmt: skip


class DecodeInputs(NamedTuple):
    """Inputs of T tokens, each of which is a sequence of its own for attention.

    Attributes:
        token_rows: [T] int64 on the host.
        token_ids: [T] int32.
        positions: [T] int64.
        slots: [T] int64, ``block_id * block_size + offset``.
        seq_lens: [T] int32, up to this token.
        block_tables: [T, W] int32.
    """

    token_rows: LongArray
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    block_tables: Tensor


def gather_decodes(tables: RowTables, rows: LongArray, counts: IntArray, width: int) -> DecodeInputs:
    """Gather the newest token of each row, and the drafted tokens behind it.

    Args:
        rows: [n] int64, with blocks for all of their tokens.
        counts: [n] int32, tokens of each row, at least 1.
        width: W, blocks of the longest sequence.
    """
    if not is_available():
        return _gather_decodes(tables, rows, counts, width)
    num_tokens = sum(counts.tolist())
    token_rows = torch.empty(num_tokens, dtype=torch.int64)
    token_ids = torch.empty(num_tokens, dtype=torch.int32)
    positions = torch.empty(num_tokens, dtype=torch.int64)
    slots = torch.empty(num_tokens, dtype=torch.int64)
    seq_lens = torch.empty(num_tokens, dtype=torch.int32)
    block_tables = torch.empty((num_tokens, width), dtype=torch.int32)
    library().quire_gather_decodes(
        ctypes.addressof(tables.native), rows.ctypes.data, counts.ctypes.data, rows.size, width,
        token_rows.data_ptr(), token_ids.data_ptr(), positions.data_ptr(), slots.data_ptr(), seq_lens.data_ptr(),
        block_tables.data_ptr(),
    )  # fmt: skip
    return DecodeInputs(token_rows.numpy(), token_ids, positions, slots, seq_lens, block_tables)


def _gather_decodes(tables: RowTables, rows: LongArray, counts: IntArray, width: int) -> DecodeInputs:
    """Gather with numpy and torch, as the C++ op does."""
    token_rows = np.repeat(rows, counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    positions = tables.lens[token_rows] - 1 + np.arange(token_rows.size) - firsts
    index, offsets = np.divmod(positions, tables.block_size)
    row_index = torch.from_numpy(token_rows)
    block_tables = tables.block_tables[:, :width].index_select(0, row_index)
    blocks = tables.block_tables.numpy()[token_rows, index].astype(np.int64)
    device_positions = torch.from_numpy(positions)
    return DecodeInputs(
        token_rows,
        tables.token_ids[row_index, device_positions],
        device_positions,
        torch.from_numpy(blocks * tables.block_size + offsets),
        device_positions.int() + 1,
        block_tables,
    )
