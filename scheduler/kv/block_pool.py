"""BlockPool: reference counts of blocks, and a free queue that is also the LRU of cached blocks."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...proto.stream import BlockState

SCRATCH_BLOCK = 0
# States of blocks with no, one and more references.
_STATE_BY_REFERENCES = np.array([BlockState.EMPTY, BlockState.HELD, BlockState.SHARED], np.uint8)


class BlockPool:
    """A fixed set of KV blocks. Block 0 is scratch for padding rows and is never allocated.

    A block is *held* (reference count above 0), *fenced* (deferred free: released, but a step in flight may still
    use it), *cached* (released, its content kept for prefix hits until the block is needed) or *empty*. Held, fenced
    and cached blocks can be shared. Empty blocks are allocated first, then cached ones in the order of their release.

    Args:
        num_blocks: including the scratch block.
        on_evict: called with each cached block whose content is evicted.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._cacheable: set[int] = set()
        # Blocks that were never used are counted, not listed: a pool of a million blocks costs nothing to make.
        self._next_fresh = SCRATCH_BLOCK + 1
        # An OrderedDict is a linked list with a lookup: append, pop an end and remove from the middle in O(1).
        self._empty: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fenced: deque[tuple[int, int]] = deque()  # (step, block), by step
        self._fence_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Return the number of blocks that `allocate` can return now, including cached ones."""
        return self.num_blocks - self._next_fresh + len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_fenced(self) -> int:
        return len(self._fence_of)

    @property
    def num_held(self) -> int:
        return self.num_blocks - 1 - self.num_free - self.num_fenced

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def states(self, block_ids: range) -> bytes:
        """Return a BlockState for each block."""
        counts = np.frombuffer(self._ref_counts, np.int32)[block_ids.start : block_ids.stop : block_ids.step]
        states = _STATE_BY_REFERENCES[np.minimum(counts, 2)]
        for cell in np.flatnonzero(counts == 0).tolist():
            block_id = block_ids[cell]
            if block_id in self._cached:
                states[cell] = BlockState.CACHED
            elif block_id in self._fence_of:
                states[cell] = BlockState.FENCED
        return states.tobytes()

    def allocate(self, num_blocks: int) -> list[int]:
        """Return `num_blocks` blocks (at most `num_free`), each with one reference."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks requested, {self.num_free} are free"
        block_ids = [self._empty.popitem()[0] for _ in range(min(num_blocks, len(self._empty)))]
        num_fresh = min(num_blocks - len(block_ids), self.num_blocks - self._next_fresh)
        block_ids += range(self._next_fresh, self._next_fresh + num_fresh)
        self._next_fresh += num_fresh
        block_ids += [self._evict_oldest() for _ in range(num_blocks - len(block_ids))]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that are held, fenced or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0 and self._fence_of.pop(block_id, None) is None:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int], fence_step: int | None) -> None:
        """Drop one reference of each block; the first in `block_ids` is evicted first.

        Args:
            fence_step: newest step in flight, which may still use the blocks: they become free at the
                `free_fenced` for this step. None if no step is in flight: they become free now.
        """
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            assert self._ref_counts[block_id] == 0, f"block {block_id} was released more often than held"
            if fence_step is None:
                self._make_free(block_id)
            else:
                self._fence(block_id, fence_step)

    def fence_unheld(self, block_ids: Iterable[int], fence_step: int) -> None:
        """Fence the blocks without references: step `fence_step`, the newest, reads them."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._empty.pop(block_id, None)
                self._cached.pop(block_id, None)
                self._fence(block_id, fence_step)

    def free_fenced(self, step_id: int) -> None:
        """Free the blocks fenced by steps up to `step_id`, which are done."""
        while self._fenced and self._fenced[0][0] <= step_id:
            step, block_id = self._fenced.popleft()
            if self._fence_of.get(block_id) == step:
                del self._fence_of[block_id]
                self._make_free(block_id)

    def keep_content(self, block_id: int) -> None:
        """Keep a block's content after its release: it is in the prefix cache."""
        self._cacheable.add(block_id)

    def forget_content(self) -> None:
        """Keep no block's content after its release: the prefix cache was emptied."""
        self._cacheable.clear()
        self._empty |= self._cached
        self._cached.clear()

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Keep these blocks' content no longer than they are held."""
        for block_id in block_ids:
            self._cacheable.discard(block_id)
            if block_id in self._cached:
                del self._cached[block_id]
                self._empty[block_id] = None

    def check_integrity(self, expected_ref_counts: dict[int, int]) -> None:
        """Recount all blocks. Raises AssertionError at the first inconsistency.

        Args:
            expected_ref_counts: block |-> references, counted over all block tables.
        """
        empty, cached, fenced = set(self._empty), set(self._cached), set(self._fence_of)
        assert cached <= self._cacheable, f"cached without content: {cached - self._cacheable}"
        for block_id in range(1, self.num_blocks):
            count = self._ref_counts[block_id]
            expected = expected_ref_counts.get(block_id, 0)
            assert count == expected, f"block {block_id} has {count} references, the tables have {expected}"
            places = (count > 0) + (block_id in empty) + (block_id in cached) + (block_id in fenced)
            places += block_id >= self._next_fresh
            assert places == 1, f"block {block_id} is in {places} places"
        assert self._ref_counts[SCRATCH_BLOCK] == 0, "the scratch block was allocated"
        assert SCRATCH_BLOCK not in expected_ref_counts, "a table has the scratch block"

    def _fence(self, block_id: int, fence_step: int) -> None:
        self._fence_of[block_id] = fence_step
        self._fenced.append((fence_step, block_id))

    def _evict_oldest(self) -> int:
        """Evict the cached block that was released first; return it."""
        block_id, _ = self._cached.popitem(last=False)
        self._cacheable.discard(block_id)
        self._on_evict(block_id)
        return block_id

    def _make_free(self, block_id: int) -> None:
        if block_id in self._cacheable:
            self._cached[block_id] = None
        else:
            self._empty[block_id] = None
