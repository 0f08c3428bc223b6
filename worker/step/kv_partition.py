"""KvPartition: this rank's part of the KV pool with data-parallel attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...proto.block_tables import IntArray
from ...proto.step import StepPlan


@dataclass(frozen=True, slots=True)
class KvPartition:
    """The blocks of the pool that are in this rank's memory.

    The scheduler numbers the blocks of all ranks, those of rank 0 first (see scheduler.kv.block_pool). A row is
    computed by the rank that has its blocks. A rank numbers its own blocks from 0.

    Attributes:
        index: of the rank.
        num_blocks, num_host_blocks: on each rank, block 0 included.
    """

    index: int
    num_blocks: int
    num_host_blocks: int

    @property
    def first_block(self) -> int:
        """Return the pool's number of this rank's block 0."""
        return self.index * self.num_blocks

    def has(self, block_ids: IntArray) -> npt.NDArray[np.bool_]:
        """Return which blocks of the pool are this rank's."""
        is_own: npt.NDArray[np.bool_] = block_ids // self.num_blocks == self.index
        return is_own

    def renumber(self, block_tables: Tensor, slots: Tensor, block_size: int) -> None:
        """Convert block tables and slots of this rank's rows from the pool's numbers to this rank's, in place."""
        # Stale entries beyond a sequence's blocks may be of another rank.
        block_tables.sub_(self.first_block).clamp_(0, self.num_blocks - 1)
        slots.sub_(self.first_block * block_size)

    def own_moves(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the block moves of this rank only, by this rank's numbers."""
        if not (len(plan.copies) or len(plan.swap_out) or len(plan.swap_in)):
            return plan
        first, first_on_host = self.first_block, self.index * self.num_host_blocks
        return replace(
            plan,
            copies=plan.copies[self.has(plan.copies[:, 0])] - np.int32(first),
            swap_out=plan.swap_out[self.has(plan.swap_out[:, 0])]
            - np.array([first, first_on_host], np.int32),
            swap_in=plan.swap_in[self.has(plan.swap_in[:, 1])] - np.array([first_on_host, first], np.int32),
        )
