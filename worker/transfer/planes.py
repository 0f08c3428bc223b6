"""Planes: where the heads of blocks are in memory, of all layers of a cache group at once.

A plane is the keys of a layer, its values, or the scales of either: an array [blocks, heads, bytes of a head].
Addresses of thousands of pieces come from a few operations on arrays: layer by layer they took as long as the copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ...kernels.native.memory import Addresses
from ...proto.block_tables import IntArray

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Planes:
    """The planes of some layers, one after the other.

    Attributes:
        table: [planes, 6] of each plane: place of its first block, bytes from one block to the next, bytes of a head,
            number of its first head, its heads, its blocks.
    """

    NUM_FIELDS: ClassVar[int] = 6

    table: Numbers

    @staticmethod
    def unpack(raw: bytes) -> Planes:
        """Return what `pack` returned. Raises ValueError for other bytes."""
        return Planes(np.frombuffer(raw, np.int64).reshape(-1, Planes.NUM_FIELDS))

    def pack(self, start: int) -> bytes:
        """Return the table with places that count from `start`."""
        packed: bytes = (self.table - np.array([start, 0, 0, 0, 0, 0])).tobytes()
        return packed

    def __len__(self) -> int:
        return len(self.table)

    @property
    def head_bytes(self) -> Numbers:
        return self.table[:, 2]

    def part(self, first: int, like: Planes) -> Planes:
        """Return the planes from `first` on that another rank's are in its own memory.

        Raises:
            ValueError: there are fewer, or heads of other lengths.
        """
        found = Planes(self.table[first : first + len(like)])
        if not np.array_equal(found.head_bytes, like.head_bytes):
            raise ValueError(f"heads have {found.head_bytes} bytes, must have {like.head_bytes}")
        return found

    def are_within(self, num_bytes: int) -> bool:
        """Return whether all planes are within memory of so many bytes, whatever the table says."""
        starts, strides, head_bytes, _, num_heads, num_blocks = self.table.astype(object).T
        ends = starts + (num_blocks - 1) * strides + num_heads * head_bytes
        return bool((self.table[:, [0, 1, 2, 4, 5]] >= 0).all() and (ends <= num_bytes).all())

    def addresses(self, base: int, block_ids: IntArray, first: Numbers, count: Numbers) -> Addresses:
        """Return where some heads of blocks are, [planes, blocks].

        Args:
            base: address of the memory.
            first, count: of each plane, the number of the first head and how many; a count of 0 for none.

        Raises:
            ValueError: the planes do not have these heads or blocks.
        """
        starts, strides, head_bytes, first_heads, num_heads, num_blocks = self.table.T
        skipped = first - first_heads
        are_heads = (count == 0) | ((skipped >= 0) & (skipped + count <= num_heads))
        blocks = block_ids.astype(np.int64)
        if not are_heads.all() or (blocks.size and not 0 <= blocks.min() <= blocks.max() < num_blocks.min()):
            raise ValueError(f"heads {first[~are_heads]} or blocks {block_ids} are not in this memory")
        places = (base + starts + skipped * head_bytes)[:, None] + strides[:, None] * blocks
        addresses: Addresses = places.astype(np.uint64)
        return addresses
