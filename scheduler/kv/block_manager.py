"""BlockManager: the one owner of every row's blocks. Pools, prefix caches and block tables change here together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...proto.block_tables import BlockTables, IntArray
from ...proto.config import EngineConfig
from ...proto.step import NO_PAIRS
from ..sequences.sequence import Sequence
from .block_pool import BlockPool
from .cache_journal import CacheJournal
from .host_tier import HostTier
from .prefix_cache import CacheKey, PrefixCache, child_digest

# A part of a block is worth a copy from this share of it on.
MIN_PARTIAL_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Prefix:
    """What memory holds of a sequence's beginning.

    Attributes:
        blocks: (block, whether it is a host block), in order; full blocks.
        partial: a block whose first tokens continue it, and how many; worth a copy.
    """

    blocks: tuple[tuple[int, bool], ...] = ()
    partial: tuple[int, int] | None = None

    def num_tokens(self, block_size: int) -> int:
        return len(self.blocks) * block_size + (self.partial[1] if self.partial else 0)


@dataclass(slots=True)
class Transfers:
    """Block moves of the plan in the making, as StepPlan has them."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


class BlockManager:
    """Gives rows their blocks and takes them back.

    Attributes:
        tables: row |-> block ids; the truth that the ranks copy.
        journal: of the prefixes that can be found, in device or host memory.
        num_query_tokens, num_hit_tokens: prompt tokens looked up in the prefix caches, and found.
        num_swapped_blocks: moved to and from host memory, for whatever reason.
    """

    def __init__(self, config: EngineConfig) -> None:
        cache = config.cache
        assert cache.num_blocks is not None, "the pool's size is resolved before the scheduler is made"
        self.block_size = cache.block_size
        self.tables = BlockTables(config.scheduler.max_num_seqs, config.max_blocks_per_seq)
        self.journal = CacheJournal()
        self.host = (
            HostTier(cache.num_host_blocks, cache.block_size, self.journal) if cache.num_host_blocks else None
        )
        self._cache = PrefixCache(cache.block_size, self.journal) if cache.prefix_caching else None
        self._pool = BlockPool(cache.num_blocks, on_evict=self._evict)
        self._transfers = Transfers()
        # Blocks that the plan in the making reads from, held until it is made: an allocation must not evict them.
        self._held: list[int] = []
        self._held_on_host: list[int] = []
        # Blocks that the plan in the making fills. Its own sequences may share them, since a step writes KV before
        # it reads any, but not copy them, since copies come first of all.
        self._filling: set[int] = set()
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_swapped_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can have: all but the scratch block."""
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
    def num_unheld_blocks(self) -> int:
        """Free now, or as soon as the steps in flight are done."""
        return self._pool.num_free + self._pool.num_fenced

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_lacking_blocks(self, row: int, num_tokens: int) -> int:
        """Blocks that a row's table needs to hold `num_tokens`."""
        return max(0, self.num_blocks_for(num_tokens) - int(self.tables.lens[row]))

    # Looking up

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """What is at hand of the sequence's beginning, as far as the sequence can use it.

        The last known token is computed again in any case: its logits are what the next one is sampled from.
        """
        if self._cache is None:
            return Prefix()
        tokens, most = sequence.token_ids, sequence.num_reusable_tokens
        num_full = most // self.block_size
        self._cache.extend(sequence.root, sequence.block_digests, tokens, num_full)
        blocks = tuple(self._find_blocks(sequence.block_digests[:num_full]))
        start = len(blocks) * self.block_size
        parent = sequence.block_digests[len(blocks) - 1] if blocks else sequence.root
        partial = None
        if start < most:
            partial = self._cache.closest_child(parent, tokens[start : min(most, start + self.block_size)])
        if partial is not None and not self._is_worth_a_copy(*partial):
            partial = None
        return Prefix(blocks, partial)

    def _is_worth_a_copy(self, block_id: int, num_tokens: int) -> bool:
        return block_id not in self._filling and num_tokens >= MIN_PARTIAL_SHARE * self.block_size

    def num_cached_tokens(self, sequence: Sequence) -> int:
        return self.find_prefix(sequence).num_tokens(self.block_size)

    def num_blocks_to_open(self, prefix: Prefix, num_tokens: int) -> int:
        """Free blocks that a row with this prefix and `num_tokens` takes, cached ones that it shares included."""
        shared = [block_id for block_id, on_host in prefix.blocks if not on_host]
        unheld = sum(self._pool.is_cached(block_id) for block_id in shared)
        if prefix.partial is not None:
            unheld += self._pool.is_cached(prefix.partial[0])
        return self.num_blocks_for(num_tokens) - len(shared) + unheld

    # Giving

    def open(self, row: int, sequence: Sequence, prefix: Prefix) -> int:
        """Puts a prefix at the head of an empty row's table; returns the tokens whose KV it has then."""
        assert self._cache is not None or not prefix.blocks
        self._hold_sources(prefix)
        for index, (block_id, on_host) in enumerate(prefix.blocks):
            if on_host:
                self._append(row, self._bring_in([block_id]))
                self._publish(row, sequence, index)
            else:
                self._pool.share([block_id])
                self._append(row, [block_id])
        if prefix.partial is not None:
            self._append(row, [self._copy(prefix.partial[0])])
        num_tokens = prefix.num_tokens(self.block_size)
        if self._cache is not None:
            self.num_query_tokens += len(sequence.token_ids)
            self.num_hit_tokens += num_tokens
        return num_tokens

    def open_fork(self, row: int, source_row: int, num_tokens: int) -> None:
        """Gives an empty row the first `num_tokens` of another: full blocks shared, the block to write copied.

        The copy is made when the fork is planned, since its first step writes that block (copy-on-write as in
        Kwon et al., SOSP 2023).
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        blocks = self.tables.row(source_row)[:num_full].tolist()
        self._pool.share(blocks)
        self._append(row, blocks)
        if rest:
            self._append(row, [self._copy(int(self.tables.ids[source_row, num_full]))])

    def grow(self, row: int, num_tokens: int) -> list[int]:
        """Extends a row's table to hold `num_tokens`; the pool must have the blocks. Returns the new ones."""
        blocks = self._pool.allocate(self.num_lacking_blocks(row, num_tokens))
        self._append(row, blocks)
        return blocks

    def grow_by_one(self, rows: IntArray) -> IntArray:
        """One more block for each row; the pool must have them. Returns the blocks."""
        blocks = np.asarray(self._pool.allocate(rows.size), np.int32)
        self.tables.append(rows, blocks)
        return blocks

    def publish(self, row: int, sequence: Sequence, first_token: int, end_token: int) -> None:
        """Makes the blocks findable that fill up as tokens `first_token` to `end_token` are computed.

        Called when the computation is planned: steps run in order, and a step writes its KV before it reads any,
        so whoever finds a block in this plan or a later one reads it after it was written.
        """
        if self._cache is None:
            return
        first, end = first_token // self.block_size, end_token // self.block_size
        self._cache.extend(sequence.root, sequence.block_digests, sequence.token_ids, end)
        for index in range(first, end):
            self._publish(row, sequence, index)
            self._filling.add(int(self.tables.ids[row, index]))

    def publish_next(self, sequence: Sequence, block_id: int, tokens: bytes) -> None:
        """Makes the block findable that follows those whose digest the sequence has; its KV is computed.

        Args:
            tokens: the block's, as int32.
        """
        if self._cache is None:
            return
        digests = sequence.block_digests
        parent = digests[-1] if digests else sequence.root
        digest = child_digest(parent, tokens)
        digests.append(digest)
        self._keep(CacheKey(digest, parent, tokens), block_id)

    # Taking back

    def close(self, row: int, fence_step: int | None) -> None:
        """Takes back all of a row's blocks, the last first: a prefix is evicted from its leaves."""
        self._pool.release(self.tables.row(row)[::-1].tolist(), fence_step)
        self.tables.release(np.array([row], np.int32))

    def keep_partial(self, row: int, sequence: Sequence, index: int, last_tokens: IntArray) -> None:
        """Makes a row's part-filled last block, number `index`, findable before the row is closed.

        Args:
            last_tokens: those of its tokens whose KV is computed, fewer than a block.
        """
        if self._cache is None or last_tokens.size < MIN_PARTIAL_SHARE * self.block_size:
            return
        parent = sequence.block_digests[index - 1] if index else sequence.root
        tokens = last_tokens.tobytes()
        self._keep(CacheKey(child_digest(parent, tokens), parent, tokens), int(self.tables.ids[row, index]))

    def swap_out(self, row: int, num_tokens: int) -> list[int] | None:
        """Sends a row's first `num_tokens` to host memory; None where there is no room. The row is still open."""
        if self.host is None:
            return None
        num_blocks = self.num_blocks_for(num_tokens)
        host_blocks = self.host.reserve(num_blocks)
        if host_blocks is not None:
            blocks = self.tables.row(row)[:num_blocks].tolist()
            self._transfers.swap_out += zip(blocks, host_blocks, strict=True)
        return host_blocks

    def swap_in(self, row: int, host_blocks: list[int]) -> None:
        """Brings a preempted sequence's blocks back into an empty row, and gives up those in host memory."""
        assert self.host is not None
        self._append(row, self._bring_in(host_blocks))
        self._held_on_host += host_blocks

    def drop_host_blocks(self, host_blocks: list[int]) -> None:
        """A preempted sequence will not come back."""
        if host_blocks:
            assert self.host is not None
            self.host.release(host_blocks)

    def take_transfers(self, step_id: int) -> tuple[IntArray, IntArray, IntArray]:
        """The block moves that step `step_id` has to make, each [n, 2]: copies, swap_out, swap_in."""
        moves, self._transfers = self._transfers, Transfers()
        self._pool.release(self._held, fence_step=step_id)
        self._held = []
        self._pool.fence_unheld((block_id for block_id, _ in moves.swap_out), step_id)
        if self.host is not None:
            self.host.release(self._held_on_host)
            self._held_on_host = []
        self.num_swapped_blocks += len(moves.swap_out) + len(moves.swap_in)
        return _pairs(moves.copies), _pairs(moves.swap_out), _pairs(moves.swap_in)

    def begin_plan(self) -> None:
        """Another plan is in the making: what the last one filled is full."""
        self._filling.clear()

    def free_fenced(self, step_id: int) -> None:
        self._pool.free_fenced(step_id)

    def check_integrity(self, host_blocks: list[int]) -> None:
        """Recounts the pools against the tables; raises AssertionError on any difference.

        Args:
            host_blocks: those that preempted sequences have.
        """
        tables = self.tables
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
        """Keeps all that a prefix names where it is until the plan is made."""
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
        """A new block with the content of another."""
        self._hold([source])
        (copy,) = self._pool.allocate(1)
        self._transfers.copies.append((source, copy))
        return copy

    def _bring_in(self, host_blocks: list[int]) -> list[int]:
        blocks = self._pool.allocate(len(host_blocks))
        self._transfers.swap_in += zip(host_blocks, blocks, strict=True)
        return blocks

    def _append(self, row: int, blocks: list[int]) -> None:
        self.tables.append(np.full(len(blocks), row, np.int32), np.asarray(blocks, np.int32))

    def _publish(self, row: int, sequence: Sequence, index: int) -> None:
        """Makes a row's full block `index` findable, whose digest the sequence has."""
        assert self._cache is not None
        parent = sequence.block_digests[index - 1] if index else sequence.root
        start = index * self.block_size
        tokens = sequence.token_ids[start : start + self.block_size].tobytes()
        key = CacheKey(sequence.block_digests[index], parent, tokens)
        self._keep(key, int(self.tables.ids[row, index]))

    def _keep(self, key: CacheKey, block_id: int) -> None:
        assert self._cache is not None
        if self._cache.insert(key, block_id):
            self._pool.keep_content(block_id)

    def _evict(self, block_id: int) -> None:
        """A cached block is needed for something else: its content goes to host memory, or is lost."""
        assert self._cache is not None
        key = self._cache.key_of(block_id)
        self._cache.forget(block_id)
        if self.host is None or len(key.tokens) < 4 * self.block_size:
            return
        host_block = self.host.take_in(key)
        if host_block is not None:
            self._transfers.swap_out.append((block_id, host_block))
            self._held_on_host.append(host_block)


def _pairs(moves: list[tuple[int, int]]) -> IntArray:
    return np.array(moves, np.int32) if moves else NO_PAIRS
