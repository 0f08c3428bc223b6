"""Block tables on the device: taking over new entries, and finding the slots of tokens."""

from __future__ import annotations

from torch import Tensor

from .dispatch import on_gpu


@on_gpu("block_tables")
def put_entries(tables: Tensor, entries: Tensor) -> None:
    """Writes entries of block tables.

    Args:
        tables: [R, M] int32.
        entries: [n, 3] int32: row, index and block id; no (row, index) twice.
    """
    rows, index, block_ids = entries.unbind(1)
    tables[rows.long(), index.long()] = block_ids


@on_gpu("block_tables")
def map_slots(tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slot of each token, ``block_id * B + offset``.

    Args:
        tables: [R, M] int32.
        rows: [T] int64, the row of each token.
        positions: [T] int64, its place in the row's sequence.

    Returns:
        [T] int64.
    """
    block_ids = tables[rows, positions // block_size].long()
    return block_ids.mul_(block_size).add_(positions % block_size)
