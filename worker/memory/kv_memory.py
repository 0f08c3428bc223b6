"""KvMemory: the memory for the KV cache of one rank; KvPartition: the blocks that are in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ...proto.model.parallel_split import WHOLE_MODEL, Stage
from ...proto.step import StepPlan
from .allocation import check_host_memory, out_of_memory_as
from .cache_engine import CacheEngine, bytes_per_block, bytes_per_state
from .kv_segment import KvSegment
from .shared_segment import SegmentAddress

_log = logging.getLogger(__name__)


class KvMemory:
    """The memory for the KV cache of one rank, which sleep frees.

    On a CPU it is a segment, which sleep only empties, if others map it: with `standby_weights` the next rank, with
    `kv_transfer` the ranks that read blocks.

    Args:
        rank: named in errors.
        stage: the layers of this rank.

    Attributes:
        block_bytes: of a block, in all layers of this rank.
        states_bytes: of all state slots of this rank; 0 for a model without states.
        host_states_bytes: of those in host memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        stage: Stage = WHOLE_MODEL,
    ) -> None:
        self._config, self._rank, self._device = config, rank, device
        self._make_cache: Callable[..., CacheEngine] = partial(
            CacheEngine, config, dtype=dtype, device=device, stage=stage
        )
        self.block_bytes = bytes_per_block(config, dtype, stage)
        self.states_bytes = bytes_per_state(config, dtype, stage) * (config.cache.num_state_slots or 0)
        self.host_states_bytes = 0
        if self.states_bytes and config.cache.num_host_state_slots:
            num_host_slots = config.cache.num_host_state_slots + 1
            self.host_states_bytes = bytes_per_state(config, dtype, stage) * num_host_slots
        self._cache: CacheEngine | None = None
        self._segment: KvSegment | None = None
        self._num_blocks = 0

    @property
    def is_allocated(self) -> bool:
        return self._cache is not None

    @property
    def cache(self) -> CacheEngine:
        """Return the cache, which has been allocated."""
        assert self._cache is not None, "allocate_cache must be called before the first step"
        return self._cache

    @property
    def segment(self) -> SegmentAddress | None:
        """Return the segment that outlives the process, the same one until `close`. Returns None if there is none."""
        if self._segment is None or not self._config.parallel.standby_weights:
            return None
        return self._segment.address

    def allocate(
        self, num_blocks: int, *, touches_pages: bool = True, inherited: SegmentAddress | None = None
    ) -> bool:
        """Allocate the cache on the device and the host; return whether it has the content of the rank before.

        Args:
            touches_pages: on a CPU, write the whole memory now, so that no step does so for the first time.
            inherited: memory of the rank that this one replaces, whose content stays.

        Raises:
            ConfigError: there is not enough memory.
        """
        num_host_blocks = self._config.cache.num_host_kv_blocks
        device_bytes, host_bytes = (count * self.block_bytes for count in (num_blocks, num_host_blocks))
        device_bytes += self.states_bytes
        host_bytes += self.host_states_bytes
        on_host = f" and {host_bytes / 2**30:.2f} GiB for what is swapped" if host_bytes else ""
        failure = f"rank {self._rank} cannot allocate {device_bytes / 2**30:.2f} GiB of KV memory{on_host}"
        is_mapped = self._config.parallel.standby_weights or self._config.cache.kv_transfer
        if is_mapped and self._device.type == "cpu" and self._segment is None:
            self._segment = self._open_segment(num_blocks, inherited)
        is_inherited = self._segment is not None and self._segment.is_inherited
        if not is_inherited:
            check_host_memory(host_bytes + (device_bytes if self._device.type == "cpu" else 0), failure)
        with out_of_memory_as(failure):
            if self._segment is not None and touches_pages and not is_inherited:
                self._segment.touch_pages()
            self._cache = self._make_cache(
                num_blocks, num_host_blocks, touches_pages=touches_pages, segment=self._segment
            )
        self._num_blocks = num_blocks
        return is_inherited

    def allocate_again(self) -> None:
        """Allocate as many blocks as before `free`, if they are free. Raises as `allocate` does."""
        if self._cache is None:
            self.allocate(self._num_blocks)

    def make_scratch(self) -> CacheEngine:
        """Return a cache of the scratch block and the scratch slot alone, for profiling."""
        return self._make_cache(1, 0, num_state_slots=1)

    def free(self) -> None:
        """Free the cache; a segment stays, empty."""
        self._cache = None
        if self._segment is not None:
            self._segment.clear()

    def close(self) -> None:
        """Free the cache, and leave a segment with its content to others who have it open."""
        self._cache = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _open_segment(self, num_blocks: int, inherited: SegmentAddress | None) -> KvSegment | None:
        """Return the segment of the rank before, or a new one. Returns None if the system has no such memory."""
        try:
            if inherited is not None:
                return KvSegment.open(inherited)
        except OSError as error:
            _log.warning("rank %d cannot map the KV of the rank before: %s", self._rank, error)
        try:
            return KvSegment.create(
                (num_blocks + self._config.cache.num_host_kv_blocks + 1) * self.block_bytes
                + self.states_bytes
                + self.host_states_bytes
            )
        except OSError as error:
            _log.warning("no other process can map the KV of rank %d: %s", self._rank, error)
            return None


@dataclass(frozen=True, slots=True)
class KvPartition:
    """The blocks of the pool that are in this rank's memory, and in that of the ranks that share its attention.

    The scheduler numbers the blocks of all partitions, those of the first one first (see scheduler.kv.block_pool). A
    row is computed by the ranks that have its blocks. A rank numbers its own blocks from 0.

    Attributes:
        index: of the partition.
        num_blocks, num_host_blocks: of each partition, block 0 included.
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
