"""BlockMap: the state of every KV block of a replica, made on request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

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
    """

    query_id: int
    num_blocks: int
    stride: int
    states: bytes
    rows: IntArray
    sequences: tuple[MappedSequence, ...] = ()
