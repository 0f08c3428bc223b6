"""Inputs of a draft model's forward pass over tokens of some rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...kernels.decode_splits import split_decodes
from ...proto.block_tables import IntArray, RowArray
from ..attention import AttentionInputs, OwnTokens
from ..memory.host_to_device import to_device_together
from ..step.batch import compute_slots
from ..step.device_rows import DeviceRows

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
    own = _Sequences(row_ids, starts + counts, counts, token_rows, positions)
    if is_decode:
        own = _Sequences(token_rows, positions + 1, np.ones_like(positions), token_rows, positions)
    own_tokens, partition = None, rows.partition
    if partition is not None:
        own, own_tokens = own.part(partition.has(rows.tables.ids[own.rows, 0]))
    arrays: list[npt.NDArray[Any]] = [
        token_rows.astype(np.int64),
        positions.astype(np.int64),
        compute_slots(rows, own.token_rows, own.positions, block_size),
        own.rows.astype(np.int32),
        np.append(0, [] if is_decode else np.cumsum(own.query_lens)).astype(np.int32),
        own.lens.astype(np.int32),
        *([] if own_tokens is None else [own_tokens]),
    ]
    tables = rows.device_tables.ids
    device_rows, device_positions, slots, row_index, query_start, device_lens, *others = to_device_together(
        arrays, tables.device
    )
    width = -(-int(own.lens.max(initial=1)) // block_size)
    splits = None
    if is_decode and tables.is_cuda and own.lens.size:
        splits = split_decodes(device_lens, width * block_size, None)
    attention = AttentionInputs(
        num_decodes=own.lens.size if is_decode else 0,
        slot_mapping=slots,
        block_tables=tables[:, :width].index_select(0, row_index),
        query_start=query_start,
        seq_lens=device_lens,
        splits=splits,
        own_tokens=OwnTokens(others[0], others[0]) if others else None,
    )
    if partition is not None:
        partition.renumber(attention.block_tables, slots, block_size)
    token_ids = rows.token_ids[device_rows, device_positions + token_offset]
    return DraftInputs(token_ids, device_positions, attention, (ends - 1).astype(np.intp))


class _Sequences(NamedTuple):
    """Sequences of attention, on the host.

    Attributes:
        rows, lens, query_lens: [S], their rows, their tokens after the pass, and those that it computes.
        token_rows, positions: [T].
    """

    rows: RowArray
    lens: IntArray | RowArray
    query_lens: IntArray | RowArray
    token_rows: RowArray
    positions: RowArray

    def part(self, is_own: npt.NDArray[np.bool_]) -> tuple[_Sequences, RowArray]:
        """Return some of the sequences, [S] bool, and the indices of their tokens among the T."""
        is_own_token = np.repeat(is_own, self.query_lens)
        own = _Sequences(
            self.rows[is_own],
            self.lens[is_own],
            self.query_lens[is_own],
            self.token_rows[is_own_token],
            self.positions[is_own_token],
        )
        return own, np.flatnonzero(is_own_token)
