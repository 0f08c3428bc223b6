"""BlockPool: reference counts of blocks, and a free queue that is also the LRU of cached blocks."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np

from ...proto.block_map import BlockState
from ...proto.block_tables import IntArray

SCRATCH_BLOCK = 0
# States of blocks with no, one and more references.
_STATE_BY_REFERENCES = np.array([BlockState.EMPTY, BlockState.HELD, BlockState.SHARED], np.uint8)

# One block, or an array of them.
Block = TypeVar("Block", int, IntArray)


@dataclass(slots=True)
class _FreeQueue:
    """The blocks of one partition that are not held.

    Attributes:
        next_fresh, end: blocks that were never used. They are counted, not listed: a pool of a million blocks costs
            nothing to make.
        empty, cached: an OrderedDict is a linked list with a lookup: append, pop an end and remove from the middle in
            O(1).
        num_fenced: blocks that are fenced, which are listed for all partitions together.
    """

    next_fresh: int
    end: int
    empty: OrderedDict[int, None] = field(default_factory=OrderedDict)
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    num_fenced: int = 0

    @property
    def num_free(self) -> int:
        return self.end - self.next_fresh + len(self.empty) + len(self.cached)


class BlockPool:
    """A fixed set of KV blocks. Block 0 is scratch for padding rows and is never allocated.

    A block is *held* (reference count above 0), *fenced* (deferred free: released, but a step in flight may still
    use it), *cached* (released, its content kept for prefix hits until the block is needed) or *empty*. Held, fenced
    and cached blocks can be shared. Empty blocks are allocated first, then cached ones in the order of their release.

    A pool may consist of partitions of equal size, each with the memory of one rank (data-parallel attention). Their
    blocks follow each other: partition p has blocks ``p * partition_blocks`` to ``(p + 1) * partition_blocks - 1``,
    of which the first is its scratch block.

    Args:
        partition_blocks: blocks of each partition, including the scratch block.
        on_evict: called with each cached block whose content is evicted.
    """

    def __init__(
        self, partition_blocks: int, on_evict: Callable[[int], None], num_partitions: int = 1
    ) -> None:
        self._partition_blocks, self.num_partitions = partition_blocks, num_partitions
        self._num_ids = partition_blocks * num_partitions
        self._on_evict = on_evict
        self._ref_counts = array("i", bytes(4 * self._num_ids))
        self._cacheable = bytearray(self._num_ids)  # 1 for blocks whose content is kept after their release
        starts = range(0, self._num_ids, partition_blocks)
        self._queues = [_FreeQueue(start + 1, start + partition_blocks) for start in starts]
        self._fenced: deque[tuple[int, list[int]]] = deque()  # (step, blocks), by step
        self._fence_of: dict[int, int] = {}

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks that can be allocated: all except the scratch blocks."""
        return self._num_ids - self.num_partitions

    @property
    def last_block(self) -> int:
        return self._num_ids - 1

    @property
    def num_free(self) -> int:
        """Return the number of blocks that `allocate` can return now from all partitions, cached ones included."""
        return sum(queue.num_free for queue in self._queues)

    @property
    def num_cached(self) -> int:
        return sum(len(queue.cached) for queue in self._queues)

    @property
    def num_fenced(self) -> int:
        return len(self._fence_of)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_fenced

    @property
    def num_blocks_per_partition(self) -> int:
        """Return the number of blocks of each partition that can be allocated."""
        return self._partition_blocks - 1

    @property
    def max_partition_use(self) -> float:
        """Return the share of its blocks that are held, of the partition with the largest share."""
        held = max(self.num_held_in(partition) for partition in range(self.num_partitions))
        return held / self.num_blocks_per_partition

    def num_free_in(self, partition: int) -> int:
        """Return the number of blocks that `allocate` can return from a partition now."""
        return self._queues[partition].num_free

    def num_unheld_in(self, partition: int) -> int:
        """Return the blocks of a partition that are free now or once the steps in flight are done."""
        queue = self._queues[partition]
        return queue.num_free + queue.num_fenced

    def num_held_in(self, partition: int) -> int:
        """Return the blocks of a partition with a reference."""
        return self.num_blocks_per_partition - self.num_unheld_in(partition)

    def partition_of(self, block_id: Block) -> Block:
        return block_id // self._partition_blocks

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._queue_of(block_id).cached

    def oldest_cached(self, count: int) -> list[int]:
        """Return the cached blocks that were released first, at most `count`, of a pool of one partition."""
        (queue,) = self._queues
        return list(islice(queue.cached, count))

    def states(self, block_ids: range) -> bytes:
        """Return a BlockState for each block."""
        counts = np.frombuffer(self._ref_counts, np.int32)[block_ids.start : block_ids.stop : block_ids.step]
        states = _STATE_BY_REFERENCES[np.minimum(counts, 2)]
        for cell in np.flatnonzero(counts == 0).tolist():
            block_id = block_ids[cell]
            if self.is_cached(block_id):
                states[cell] = BlockState.CACHED
            elif block_id in self._fence_of:
                states[cell] = BlockState.FENCED
        return states.tobytes()

    def allocate(self, num_blocks: int, partition: int = 0) -> list[int]:
        """Return `num_blocks` blocks of a partition (at most `num_free_in`), each with one reference."""
        queue = self._queues[partition]
        assert num_blocks <= queue.num_free, f"{num_blocks} blocks requested, {queue.num_free} are free"
        block_ids = [queue.empty.popitem()[0] for _ in range(min(num_blocks, len(queue.empty)))]
        num_fresh = min(num_blocks - len(block_ids), queue.end - queue.next_fresh)
        block_ids += range(queue.next_fresh, queue.next_fresh + num_fresh)
        queue.next_fresh += num_fresh
        block_ids += [self._evict_oldest(queue) for _ in range(num_blocks - len(block_ids))]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that are held, fenced or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                queue = self._queue_of(block_id)
                if self._fence_of.pop(block_id, None) is None:
                    del queue.cached[block_id]
                else:
                    queue.num_fenced -= 1
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int], fence_step: int | None) -> None:
        """Drop one reference of each block; the first in `block_ids` is evicted first.

        Args:
            fence_step: newest step in flight, which may still use the blocks: they become free at the
                `free_fenced` for this step. None if no step is in flight: they become free now.
        """
        # The scheduler plans a step ahead of the ranks. When a result shows that a sequence has ended, the next step,
        # which computes one more token of it, was broadcast before: it reads the sequence's blocks and writes to the
        # last one. The same holds for rows that were aborted or preempted, for rejected drafts, and for blocks behind
        # a window. Ranks execute steps in order, but much relies on one owner of a block at a time: the copies that a
        # plan makes before it computes, the swaps on a stream of their own, and the recovery after a failure, which
        # keeps the content of exactly the blocks that no step in flight was filling. So a released block waits behind
        # a fence, the newest step in flight at its release, and becomes free with the result of that step: then every
        # rank has executed it. Until then it is neither held nor free. A hit of the prefix cache may still take it
        # back: the cache lists full blocks only, to which no step writes any more.
        ref_counts, unheld = self._ref_counts, list[int]()
        for block_id in block_ids:
            ref_counts[block_id] -= 1
            if ref_counts[block_id] <= 0:
                assert ref_counts[block_id] == 0, f"block {block_id} was released more often than held"
                unheld.append(block_id)
        if fence_step is None:
            self._make_free(unheld)
        elif unheld:
            self._fence(unheld, fence_step)

    def fence_unheld(self, block_ids: Iterable[int], fence_step: int) -> None:
        """Fence the blocks without references: step `fence_step`, the newest, reads them."""
        unheld = [block_id for block_id in dict.fromkeys(block_ids) if self._ref_counts[block_id] == 0]
        for block_id in unheld:
            queue = self._queue_of(block_id)
            queue.empty.pop(block_id, None)
            queue.cached.pop(block_id, None)
        if unheld:
            self._fence(unheld, fence_step)

    def free_fenced(self, step_id: int) -> None:
        """Free the blocks fenced by steps up to `step_id`, which are done."""
        while self._fenced and self._fenced[0][0] <= step_id:
            step, block_ids = self._fenced.popleft()
            # Without those that were shared, or fenced by a later step, since.
            done = [block_id for block_id in block_ids if self._fence_of.get(block_id) == step]
            for block_id in done:
                del self._fence_of[block_id]
            self._count_fenced(done, -1)
            self._make_free(done)

    def keep_content(self, block_ids: Iterable[int]) -> None:
        """Keep the blocks' content after their release: they are in the prefix cache."""
        for block_id in block_ids:
            self._cacheable[block_id] = 1

    def forget_content(self) -> None:
        """Keep no block's content after its release: the prefix cache was emptied."""
        self._cacheable = bytearray(self._num_ids)
        for queue in self._queues:
            queue.empty |= queue.cached
            queue.cached.clear()

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Keep these blocks' content no longer than they are held."""
        for block_id in block_ids:
            self._cacheable[block_id] = 0
            queue = self._queue_of(block_id)
            if block_id in queue.cached:
                del queue.cached[block_id]
                queue.empty[block_id] = None

    def check_integrity(self, expected_ref_counts: dict[int, int]) -> None:
        """Recount all blocks. Raises AssertionError at the first inconsistency.

        Args:
            expected_ref_counts: block |-> references, counted over all block tables.
        """
        for partition, queue in enumerate(self._queues):
            self._check_partition(partition * self._partition_blocks, queue, expected_ref_counts)

    def _check_partition(
        self, scratch_block: int, queue: _FreeQueue, expected_ref_counts: dict[int, int]
    ) -> None:
        own = range(scratch_block + 1, scratch_block + self._partition_blocks)
        empty, cached, fenced = set(queue.empty), set(queue.cached), self._fence_of.keys() & set(own)
        without = [block_id for block_id in cached if not self._cacheable[block_id]]
        assert not without, f"cached without content: {without}"
        assert len(fenced) == queue.num_fenced, f"{len(fenced)} blocks are fenced, not {queue.num_fenced}"
        for block_id in own:
            count = self._ref_counts[block_id]
            expected = expected_ref_counts.get(block_id, 0)
            assert count == expected, f"block {block_id} has {count} references, the tables have {expected}"
            places = (count > 0) + (block_id in empty) + (block_id in cached) + (block_id in fenced)
            places += block_id >= queue.next_fresh
            assert places == 1, f"block {block_id} is in {places} places"
        assert self._ref_counts[scratch_block] == 0, "the scratch block was allocated"
        assert scratch_block not in expected_ref_counts, "a table has the scratch block"

    def _fence(self, block_ids: list[int], fence_step: int) -> None:
        """Fence distinct blocks; some may be fenced already, by a swap."""
        self._count_fenced([block_id for block_id in block_ids if block_id not in self._fence_of], 1)
        self._fence_of.update(dict.fromkeys(block_ids, fence_step))
        self._fenced.append((fence_step, block_ids))

    def _count_fenced(self, block_ids: list[int], change: int) -> None:
        if self.num_partitions == 1:
            self._queues[0].num_fenced += change * len(block_ids)
            return
        for block_id in block_ids:
            self._queue_of(block_id).num_fenced += change

    def _queue_of(self, block_id: int) -> _FreeQueue:
        return self._queues[block_id // self._partition_blocks]

    def _evict_oldest(self, queue: _FreeQueue) -> int:
        """Evict the cached block that was released first; return it."""
        block_id, _ = queue.cached.popitem(last=False)
        self._cacheable[block_id] = 0
        self._on_evict(block_id)
        return block_id

    def _make_free(self, block_ids: list[int]) -> None:
        queues, size, cacheable = self._queues, self._partition_blocks, self._cacheable
        for block_id in block_ids:
            queue = queues[block_id // size]
            if cacheable[block_id]:
                queue.cached[block_id] = None
            else:
                queue.empty[block_id] = None
