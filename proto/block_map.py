"""BlockMap: the state of every KV block and state slot of a replica, made on request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from .block_tables import IntArray

# Bounds of a BlockMap.
MAX_MAP_CELLS = 8192
MAX_MAP_SEQUENCES = 256


class BlockState(IntEnum):
    """State of a KV block: EMPTY and CACHED blocks are free, SHARED blocks have more than one reference."""

    EMPTY = 0
    CACHED = 1
    FENCED = 2
    HELD = 3
    SHARED = 4


@dataclass(frozen=True, slots=True)
class MappedSequence:
    """A running sequence of a BlockMap.

    Attributes:
        num_tokens: tokens whose KV it has or is planned to have.
    """

    row: int
    request_id: str
    num_blocks: int
    num_tokens: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The state of a replica's KV blocks. Cell i shows block 1 + i * stride.

    Attributes:
        num_blocks: all blocks, without the scratch block.
        stride: 1 up to MAX_MAP_CELLS blocks; the map of a larger pool shows every stride-th block.
        states: one BlockState per cell.
        rows: [cells] int32, the row that holds the block, one of them if several do; -1 if none does.
        sequences: the MAX_MAP_SEQUENCES running sequences with the most blocks.
        slot_states: one BlockState per state slot from slot 1, of MAX_MAP_CELLS at most; snapshots are CACHED.
        slot_rows: row of the sequence whose state is in the slot; -1 if it is none's.
    """

    query_id: int
    num_blocks: int
    stride: int
    states: bytes
    rows: IntArray
    sequences: tuple[MappedSequence, ...] = ()
    slot_states: bytes = b""
    slot_rows: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
