"""BlockManager: owns the blocks of all rows; keeps pools, prefix caches and block tables consistent."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...proto.block_tables import BlockTables, IntArray, RowArray
from ...proto.config import EngineConfig
from ...proto.step import NO_PAIRS
from ..sequences.sequence import Sequence
from .block_pool import BlockPool
from .cache_journal import CacheJournal
from .host_tier import HostTier
from .prefix_cache import CacheKey, PrefixCache, child_digest

# A partial match is copied if it covers at least this share of a block.
MIN_PARTIAL_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached beginning of a sequence.

    Attributes:
        blocks: full blocks in order, as (block, whether it is a host block).
        partial: block whose first tokens continue the prefix, and the number of these tokens; to be copied.
    """

    blocks: tuple[tuple[int, bool], ...] = ()
    partial: tuple[int, int] | None = None

    def num_tokens(self, block_size: int) -> int:
        return len(self.blocks) * block_size + (self.partial[1] if self.partial else 0)


@dataclass(slots=True)
class Transfers:
    """Block moves of the next plan, as in StepPlan."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


class BlockManager:
    """The owner of the blocks of all rows.

    Attributes:
        tables: row |-> block ids; the ranks keep copies.
        journal: changes of the set of cached prefixes, in device or host memory.
        num_query_tokens, num_hit_tokens: prompt tokens looked up in the prefix caches, and found.
        num_swapped_blocks: blocks moved to and from host memory by preemptions, evictions and hits.
    """

    def __init__(self, config: EngineConfig) -> None:
        cache = config.cache
        assert cache.num_blocks is not None, "cache.num_blocks must be resolved before the scheduler is made"
        self.block_size = cache.block_size
        self.tables = BlockTables(config.scheduler.max_num_seqs, config.max_blocks_per_seq)
        self.journal = CacheJournal()
        self.host = (
            HostTier(cache.num_host_blocks, cache.block_size, self.journal) if cache.num_host_blocks else None
        )
        self._cache = PrefixCache(cache.block_size, self.journal) if cache.prefix_caching else None
        self._pool = BlockPool(cache.num_blocks, on_evict=self._evict)
        self._transfers = Transfers()
        # Blocks that the next plan reads, held until it is made: an allocation must not evict them.
        self._held: list[int] = []
        self._held_on_host: list[int] = []
        # Blocks that the next plan fills. Its own sequences may share them, since a step writes KV before it reads
        # any, but not copy them, since a step makes all copies first.
        self._filling: set[int] = set()
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_swapped_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks for sequences: all except the scratch block."""
        return self._pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_held_blocks(self) -> int:
        return self._pool.num_held

    @property
    def num_cached_blocks(self) -> int:
        return self._pool.num_cached

    @property
    def num_fenced_blocks(self) -> int:
        return self._pool.num_fenced

    @property
    def num_unheld_blocks(self) -> int:
        """Return the blocks that are free now or once the steps in flight are done."""
        return self._pool.num_free + self._pool.num_fenced

    def states(self, block_ids: range) -> bytes:
        """Return a BlockState for each block."""
        return self._pool.states(block_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_lacking_blocks(self, row: int, num_tokens: int) -> int:
        """Return the number of blocks that a row's table lacks to hold `num_tokens`."""
        return max(0, self.num_blocks_for(num_tokens) - int(self.tables.lens[row]))

    # Lookups

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """Return the cached beginning of a sequence, as far as the sequence can use it.

        The last known token is always computed again, since the next token is sampled from its logits.
        """
        if self._cache is None:
            return Prefix()
        tokens, num_reusable = sequence.token_ids, sequence.num_reusable_tokens
        num_full = num_reusable // self.block_size
        self._cache.extend(sequence.root, sequence.block_digests, tokens, num_full)
        blocks = tuple(self._find_blocks(sequence.block_digests[:num_full]))
        start = len(blocks) * self.block_size
        parent = sequence.block_digests[len(blocks) - 1] if blocks else sequence.root
        partial = None
        if start < num_reusable:
            end = min(num_reusable, start + self.block_size)
            partial = self._cache.closest_child(parent, tokens[start:end])
        if partial is not None and not self._is_worth_a_copy(*partial):
            partial = None
        return Prefix(blocks, partial)

    def _is_worth_a_copy(self, block_id: int, num_tokens: int) -> bool:
        return block_id not in self._filling and num_tokens >= MIN_PARTIAL_SHARE * self.block_size

    def num_cached_tokens(self, sequence: Sequence) -> int:
        return self.find_prefix(sequence).num_tokens(self.block_size)

    def num_blocks_to_open(self, prefix: Prefix, num_tokens: int) -> int:
        """Return the free blocks that a row with this prefix and `num_tokens` takes, including shared cached ones."""
        shared = [block_id for block_id, on_host in prefix.blocks if not on_host]
        unheld = sum(self._pool.is_cached(block_id) for block_id in shared)
        if prefix.partial is not None:
            unheld += self._pool.is_cached(prefix.partial[0])
        return self.num_blocks_for(num_tokens) - len(shared) + unheld

    # Allocation

    def open(self, row: int, sequence: Sequence, prefix: Prefix) -> int:
        """Put a prefix into an empty row's table; return the number of tokens whose KV the row has then."""
        assert self._cache is not None or not prefix.blocks
        self._hold_sources(prefix)
        blocks: list[int] = []
        for block_id, on_host in prefix.blocks:
            if on_host:
                blocks += self._load_host_blocks([block_id])
            else:
                self._pool.share([block_id])
                blocks.append(block_id)
        if prefix.partial is not None:
            blocks.append(self._copy(prefix.partial[0]))
        self._append(row, blocks)
        for index, (_, on_host) in enumerate(prefix.blocks):
            if on_host:
                self._publish(row, sequence, index)
        num_tokens = prefix.num_tokens(self.block_size)
        if self._cache is not None:
            self.num_query_tokens += len(sequence.token_ids)
            self.num_hit_tokens += num_tokens
        return num_tokens

    def open_fork(self, row: int, source_row: int, num_tokens: int) -> None:
        """Give an empty row the first `num_tokens` of another: share full blocks, copy the block to write.

        The copy is part of the plan that starts the fork, since its first step writes that block (copy-on-write as in
        Kwon et al., SOSP 2023).
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        blocks = self.tables.row(source_row)[:num_full].tolist()
        self._pool.share(blocks)
        if rest:
            blocks.append(self._copy(int(self.tables.ids[source_row, num_full])))
        self._append(row, blocks)

    def grow(self, row: int, num_tokens: int) -> list[int]:
        """Extend a row's table to hold `num_tokens`; return the new blocks. The pool must have them."""
        blocks = self._pool.allocate(self.num_lacking_blocks(row, num_tokens))
        self._append(row, blocks)
        return blocks

    def grow_by_one(self, rows: RowArray) -> IntArray:
        """Allocate one more block for each entry; return the blocks. The pool must have them.

        The entries of a row that repeats must be adjacent.
        """
        blocks = np.asarray(self._pool.allocate(rows.size), np.int32)
        self.tables.append(rows, blocks)
        return blocks

    def publish(self, row: int, sequence: Sequence, first_token: int, end_token: int) -> None:
        """Add the blocks that tokens `first_token` to `end_token` fill up to the prefix cache.

        Called when the computation is planned: steps run in order, and a step writes its KV before it reads any,
        so a sequence that finds a block in this plan or a later one reads it after it was written.
        """
        if self._cache is None:
            return
        first, end = first_token // self.block_size, end_token // self.block_size
        self._cache.extend(sequence.root, sequence.block_digests, sequence.token_ids, end)
        for index in range(first, end):
            self._publish(row, sequence, index)
            self._filling.add(int(self.tables.ids[row, index]))

    def publish_next(self, sequence: Sequence, block_id: int, tokens: bytes) -> None:
        """Add the block after those whose digests the sequence has to the prefix cache; its KV is computed.

        Args:
            tokens: the block's tokens, int32.
        """
        if self._cache is None:
            return
        digests = sequence.block_digests
        parent = digests[-1] if digests else sequence.root
        digest = child_digest(parent, tokens)
        digests.append(digest)
        if self._cache.insert(CacheKey(digest, parent, tokens), block_id):
            self._pool.keep_content(block_id)

    # Release

    def close(self, row: int, fence_step: int | None) -> None:
        """Release all of a row's blocks, the last first, so that prefixes are evicted from their ends."""
        self._pool.release(self.tables.row(row)[::-1].tolist(), fence_step)
        self.tables.release(np.array([row], np.int32))

    def trim(self, rows: RowArray, lens: IntArray, fence_step: int | None) -> None:
        """Shorten the tables of distinct rows to `lens` blocks, and release the others."""
        for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
            self._pool.release(self.tables.row(row)[length:][::-1].tolist(), fence_step)
        self.tables.trim(rows, lens)

    def keep_partial(self, row: int, sequence: Sequence, index: int, last_tokens: IntArray) -> None:
        """Add a row's partly filled last block, number `index`, to the prefix cache before the row is closed.

        Args:
            last_tokens: the block's tokens whose KV is computed, fewer than a block.
        """
        if self._cache is None or last_tokens.size < MIN_PARTIAL_SHARE * self.block_size:
            return
        parent = sequence.block_digests[index - 1] if index else sequence.root
        tokens = last_tokens.tobytes()
        self._insert(CacheKey(child_digest(parent, tokens), parent, tokens), int(self.tables.ids[row, index]))

    def flush_cache(self) -> None:
        """Forget the content of all blocks, on the device and on the host. Held blocks stay with their sequences."""
        if self._cache is not None:
            self._cache.clear()
            self._pool.forget_content()
        if self.host is not None:
            self.host.flush_cache()

    def forget_content(self) -> None:
        """Forget the content of all blocks and the planned moves: the ranks lost them. No row may have blocks."""
        self._transfers = Transfers()
        self._pool.release(self._held, fence_step=None)
        self._held = []
        if self.host is not None:
            self.host.release(self._held_on_host)
            self._held_on_host = []
        self._filling.clear()
        self.flush_cache()

    def swap_out(self, row: int, num_tokens: int) -> list[int] | None:
        """Copy a row's first `num_tokens` to host memory; return the host blocks, or None if too few are free."""
        if self.host is None:
            return None
        num_blocks = self.num_blocks_for(num_tokens)
        host_blocks = self.host.reserve(num_blocks)
        if host_blocks is not None:
            blocks = self.tables.row(row)[:num_blocks].tolist()
            self._transfers.swap_out += zip(blocks, host_blocks, strict=True)
        return host_blocks

    def swap_in(self, row: int, host_blocks: list[int]) -> None:
        """Copy a preempted sequence's host blocks back into an empty row, and release them."""
        assert self.host is not None
        self._append(row, self._load_host_blocks(host_blocks))
        self._held_on_host += host_blocks

    def drop_host_blocks(self, host_blocks: list[int]) -> None:
        """Release the host blocks of a preempted sequence that has ended."""
        if host_blocks:
            assert self.host is not None
            self.host.release(host_blocks)

    def take_transfers(self, step_id: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return and clear the block moves for step `step_id`, each [n, 2]: copies, swap_out, swap_in."""
        moves = self._transfers
        if not (moves.copies or moves.swap_out or moves.swap_in or self._held or self._held_on_host):
            return NO_PAIRS, NO_PAIRS, NO_PAIRS  # as in most steps: 0.2 us, what follows 2 us
        self._transfers = Transfers()
        self._pool.release(self._held, fence_step=step_id)
        self._held = []
        self._pool.fence_unheld((block_id for block_id, _ in moves.swap_out), step_id)
        if self.host is not None:
            self.host.release(self._held_on_host)
            self._held_on_host = []
        self.num_swapped_blocks += len(moves.swap_out) + len(moves.swap_in)
        return _pairs(moves.copies), _pairs(moves.swap_out), _pairs(moves.swap_in)

    def begin_plan(self) -> None:
        """Begin another plan: the blocks that the last one fills may be copied now."""
        self._filling.clear()

    def free_fenced(self, step_id: int) -> None:
        """Free the blocks whose release was deferred until step `step_id` is done."""
        self._pool.free_fenced(step_id)

    def check_integrity(self, host_blocks: list[int]) -> None:
        """Recount the pools against the tables. Raises AssertionError at any difference.

        Args:
            host_blocks: host blocks of preempted sequences.
        """
        tables = self.tables
        assert tables.num_blocks == tables.lens.sum(), "the entries of the block tables are miscounted"
        held = np.concatenate([tables.row(row) for row in range(len(tables.lens))])
        blocks, counts = np.unique(np.concatenate([held, np.array(self._held, np.int32)]), return_counts=True)
        self._pool.check_integrity(dict(zip(blocks.tolist(), counts.tolist(), strict=True)))
        digests = self._cache.full_digests() if self._cache is not None else []
        self.journal.check_integrity(digests + (self.host.full_digests() if self.host is not None else []))
        if self._cache is not None:
            self._cache.check_integrity()
        if self.host is not None:
            expected: dict[int, int] = {}
            for block_id in (*host_blocks, *self._held_on_host):
                expected[block_id] = expected.get(block_id, 0) + 1
            self.host.check_integrity(expected)

    # Details

    def _find_blocks(self, digests: list[bytes]) -> list[tuple[int, bool]]:
        assert self._cache is not None
        found: list[tuple[int, bool]] = []
        for digest in digests:
            block_id = self._cache.find(digest)
            on_host = block_id is None
            if block_id is None and self.host is not None:
                block_id = self.host.find(digest)
            if block_id is None:
                break
            found.append((block_id, on_host))
        return found

    def _hold_sources(self, prefix: Prefix) -> None:
        """Hold all blocks of a prefix until the plan is made."""
        device = [block_id for block_id, on_host in prefix.blocks if not on_host]
        if prefix.partial is not None:
            device.append(prefix.partial[0])
        self._hold(device)
        host = [block_id for block_id, on_host in prefix.blocks if on_host]
        if host:
            assert self.host is not None
            self.host.hold(host)
            self._held_on_host += host

    def _hold(self, block_ids: list[int]) -> None:
        self._pool.share(block_ids)
        self._held += block_ids

    def _copy(self, source: int) -> int:
        """Return a new block into which the plan copies `source`."""
        self._hold([source])
        (copy,) = self._pool.allocate(1)
        self._transfers.copies.append((source, copy))
        return copy

    def _load_host_blocks(self, host_blocks: list[int]) -> list[int]:
        blocks = self._pool.allocate(len(host_blocks))
        self._transfers.swap_in += zip(host_blocks, blocks, strict=True)
        return blocks

    def _append(self, row: int, blocks: list[int]) -> None:
        self.tables.append(np.full(len(blocks), row, np.int32), np.asarray(blocks, np.int32))

    def _publish(self, row: int, sequence: Sequence, index: int) -> None:
        """Add a row's full block `index`, whose digest the sequence has, to the prefix cache."""
        assert self._cache is not None
        parent = sequence.block_digests[index - 1] if index else sequence.root
        start = index * self.block_size
        tokens = sequence.token_ids[start : start + self.block_size].tobytes()
        key = CacheKey(sequence.block_digests[index], parent, tokens)
        self._insert(key, int(self.tables.ids[row, index]))

    def _insert(self, key: CacheKey, block_id: int) -> None:
        assert self._cache is not None
        if self._cache.insert(key, block_id):
            self._pool.keep_content(block_id)

    def _evict(self, block_id: int) -> None:
        """Evict a cached block: move its content to host memory if there is room."""
        assert self._cache is not None
        key = self._cache.key_of(block_id)
        self._cache.forget(block_id)
        if self.host is None or len(key.tokens) < 4 * self.block_size:
            return
        host_block = self.host.insert(key)
        if host_block is not None:
            self._transfers.swap_out.append((block_id, host_block))
            self._held_on_host.append(host_block)


def _pairs(moves: list[tuple[int, int]]) -> IntArray:
    return np.array(moves, np.int32) if moves else NO_PAIRS
