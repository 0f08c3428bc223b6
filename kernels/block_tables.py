"""Updates of the block tables on the device."""

from __future__ import annotations

from torch import Tensor

from .dispatch import on_gpu


@on_gpu("block_tables")
def update_block_tables(tables: Tensor, entries: Tensor) -> None:
    """Write entries of block tables.

    Args:
        tables: [R, M] int32.
        entries: [n, 3] int32: row, index and block id; each (row, index) at most once.
    """
    rows, index, block_ids = entries.unbind(1)
    tables[rows.long(), index.long()] = block_ids
