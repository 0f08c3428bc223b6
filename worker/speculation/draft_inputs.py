"""Inputs of a draft model's forward pass over tokens of some rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...kernels.decode_splits import split_decodes
from ...proto.block_tables import IntArray, RowArray
from ..attention import AttentionInputs
from ..batch import compute_slots
from ..device_rows import DeviceRows
from ..memory.host_to_device import to_device_together

# Up to this many tokens of each row are computed by the ops of a decode step, one by one.
MAX_DECODED_TOKENS = 8


class DraftInputs(NamedTuple):
    """Inputs of T tokens.

    Attributes:
        token_ids: [T] int32.
        positions: [T] int64.
        last: [n] int64 on the host, index of each row's last token among the T.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionInputs
    last: RowArray


def gather_draft_inputs(
    rows: DeviceRows,
    row_ids: RowArray,
    starts: IntArray,
    counts: IntArray,
    block_size: int,
    token_offset: int = 0,
) -> DraftInputs:
    """Gather `counts` tokens of distinct rows, from position `starts` on.

    Args:
        token_offset: places by which the tokens follow the positions.
    """
    ends = np.cumsum(counts)
    token_rows = np.repeat(row_ids, counts)
    positions = np.arange(ends[-1]) + np.repeat(starts + counts - ends, counts)
    is_decode = int(counts.max()) <= MAX_DECODED_TOKENS
    seq_rows, seq_lens = (token_rows, positions + 1) if is_decode else (row_ids, starts + counts)
    chunk_starts = np.zeros(1) if is_decode else np.append(0, ends)
    tables = rows.device_tables.ids
    arrays: list[npt.NDArray[Any]] = [
        token_rows.astype(np.int64),
        positions.astype(np.int64),
        compute_slots(rows, token_rows, positions, block_size),
        seq_rows.astype(np.int32),
        chunk_starts.astype(np.int32),
        seq_lens.astype(np.int32),
    ]
    device_rows, device_positions, slots, row_index, query_start, device_lens = to_device_together(
        arrays, tables.device
    )
    width = -(-int(seq_lens.max()) // block_size)
    splits = None
    if is_decode and tables.is_cuda:
        splits = split_decodes(device_lens, width * block_size, None)
    attention = AttentionInputs(
        num_decodes=seq_lens.size if is_decode else 0,
        slot_mapping=slots,
        block_tables=tables[:, :width].index_select(0, row_index),
        query_start=query_start,
        seq_lens=device_lens,
        splits=splits,
    )
    token_ids = rows.token_ids[device_rows, device_positions + token_offset]
    return DraftInputs(token_ids, device_positions, attention, (ends - 1).astype(np.intp))
