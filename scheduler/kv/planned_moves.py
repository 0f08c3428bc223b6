"""Blocks of a plan in flight: PlannedMoves between the tiers, and PendingFills that are not known to be written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.codec import NO_PAIRS
from .block_pool import BlockPool
from .host_tier import HostTier

Pairs = list[tuple[int, int]]


class PlannedMoves:
    """Copies and swaps of the next plan, each as (source, target).

    The blocks that they read are held until the plan is made: an allocation must not evict them.

    Attributes:
        num_swapped_blocks: blocks moved to and from host memory by preemptions, evictions and hits.
    """

    def __init__(self, pool: BlockPool, host: HostTier | None) -> None:
        self._pool, self._host = pool, host
        self._copies: Pairs = []
        self._swap_out: Pairs = []
        self._swap_in: Pairs = []
        self._held: list[int] = []
        self._held_on_host: list[int] = []
        self.num_swapped_blocks = 0

    @property
    def held(self) -> tuple[int, ...]:
        """Return the blocks that are held, as often as they are."""
        return tuple(self._held)

    @property
    def held_on_host(self) -> tuple[int, ...]:
        return tuple(self._held_on_host)

    @property
    def loaded(self) -> list[int]:
        """Return the blocks that are filled from host memory."""
        return [block_id for _, block_id in self._swap_in]

    @property
    def saved(self) -> list[int]:
        """Return the host blocks that are filled."""
        return [block_id for _, block_id in self._swap_out]

    def hold(self, block_ids: list[int]) -> None:
        """Hold blocks until the plan is made."""
        self._pool.share(block_ids)
        self._held += block_ids

    def hold_on_host(self, host_blocks: list[int]) -> None:
        """Hold cached host blocks until the plan is made."""
        assert self._host is not None
        self._host.hold(host_blocks)
        self._held_on_host += host_blocks

    def release_on_host(self, host_blocks: Iterable[int]) -> None:
        """Release host blocks, which have a reference already, when the plan is made."""
        self._held_on_host += host_blocks

    def copy(self, source: int) -> int:
        """Return a new block into which the plan copies `source`."""
        self.hold([source])
        (copy,) = self._pool.allocate(1, self._pool.partition_of(source))
        self._copies.append((source, copy))
        return copy

    def save(self, block_ids: list[int], host_blocks: list[int]) -> None:
        """Copy blocks into host blocks."""
        self._swap_out += zip(block_ids, host_blocks, strict=True)

    def load(self, host_blocks: list[int]) -> list[int]:
        """Return new blocks into which the plan copies host blocks."""
        assert self._host is not None
        blocks = self._pool.allocate(len(host_blocks), self._host.partition_of(host_blocks[0]))
        self._swap_in += zip(host_blocks, blocks, strict=True)
        return blocks

    def take(self, step_id: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return and clear the moves, which step `step_id` makes, each [n, 2]: copies, swap_out, swap_in."""
        copies, swap_out, swap_in = self._copies, self._swap_out, self._swap_in
        if not (copies or swap_out or swap_in or self._held or self._held_on_host):
            return NO_PAIRS, NO_PAIRS, NO_PAIRS  # as in most steps: 0.2 us, what follows 2 us
        self._release(fence_step=step_id)
        self._pool.fence_unheld((block_id for block_id, _ in swap_out), step_id)
        self.num_swapped_blocks += len(swap_out) + len(swap_in)
        return _array(copies), _array(swap_out), _array(swap_in)

    def drop(self) -> None:
        """Make no moves, and release what they hold: no step is in flight."""
        self._release(fence_step=None)

    def _release(self, fence_step: int | None) -> None:
        self._copies, self._swap_out, self._swap_in = [], [], []
        self._pool.release(self._held, fence_step)
        self._held = []
        if self._host is not None:
            self._host.release(self._held_on_host)
            self._held_on_host = []


def _array(moves: Pairs) -> IntArray:
    return np.array(moves, np.int32) if moves else NO_PAIRS


class PendingFills:
    """The blocks that steps fill, until a result shows that all ranks have filled them.

    The prefix caches list a block from the plan that fills it. If the ranks fail, the blocks of steps without such a
    result may be half written.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, list[int], list[int]]] = deque()  # (step, its blocks, its host blocks)

    def add(self, step_id: int, blocks: Iterable[int], host_blocks: Iterable[int]) -> None:
        """Record what step `step_id`, the newest, fills."""
        entry = step_id, list(blocks), list(host_blocks)
        if entry[1] or entry[2]:
            self._steps.append(entry)

    def confirm(self, step_id: int) -> None:
        """Forget the blocks of the steps up to `step_id`: all ranks have filled them."""
        while self._steps and self._steps[0][0] <= step_id:
            self._steps.popleft()

    def take(self) -> tuple[set[int], set[int]]:
        """Return and forget the blocks that may be half written, on the device and in host memory."""
        blocks = {block_id for _, filled, _ in self._steps for block_id in filled}
        host_blocks = {block_id for _, _, filled in self._steps for block_id in filled}
        self._steps.clear()
        return blocks, host_blocks
