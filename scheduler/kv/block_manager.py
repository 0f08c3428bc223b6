"""BlockManager: owns the blocks and states of all rows; keeps pools, prefix caches and block tables consistent."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from ...proto.block_tables import BlockTables, IntArray, RowArray
from ...proto.config import EngineConfig
from ...proto.digests import DIGEST_BYTES, chain_digests, child_digest
from ..sequences.sequence import Sequence
from .block_pool import SCRATCH_BLOCK, BlockPool, RowPartitions
from .cache_events import DEVICE_MEDIUM, CacheEvents, CacheKey, NoCacheEvents
from .cache_journal import CacheJournal
from .host_tier import HostTier
from .kv_tiers import KvTiers
from .leases import Leases
from .planned_moves import PendingFills, PlannedMoves
from .prefix_cache import MIN_PARTIAL_SHARE, PrefixCache, make_caches
from .prefix_lookup import Prefix, PrefixLookup
from .pulls import PulledBlock, Pulls
from .snapshot_policy import MIN_SNAPSHOT_BLOCKS, snapshot_ends
from .state_slots import StateSlots
from .stored_tier import NoStoredTier, StoredTier


class _HostAndFiles:
    """The host tier and the files below it, for a lookup of what could be read."""

    def __init__(self, host: HostTier, stored: StoredTier) -> None:
        self._host, self._stored = host, stored

    def find(self, cache: int, digest: bytes) -> int | None:
        """Return the host block of a digest, 0 for one that is in files, or None."""
        block_id = self._host.find(cache, digest)
        return 0 if block_id is None and self._stored.has(cache, digest) else block_id


class BlockManager:
    """The owner of the blocks of all rows.

    A row has a table of blocks in each cache group, and needs `num_groups` blocks for the same tokens. A block that
    is behind the window of its group is released; its entry in the table stays, and is not read.

    With data-parallel attention the pool has a partition per rank. All blocks of a row are in one partition, which is
    chosen when the row is opened; prefixes are found in the blocks of one partition.

    In a model whose layers keep states a row has a state slot besides. A hit then needs a snapshot of the state after
    the same tokens, and the rest of a cached prefix is computed again.

    Attributes:
        tables: row |-> block ids and state slot; the ranks keep copies.
        state_slots: without any slot for a model without states.
        stored: blocks in files, which another process may have written.
        journal: changes of the set of cached prefixes, in device or host memory.
        events: the same changes with their tokens, for routers outside of quire, if there are any.
        num_query_tokens, num_hit_tokens: prompt tokens looked up in the prefix caches, and found.
        leases: blocks that left with sequences, and are held for their readers.
        pulls: blocks that ranks read from other replicas.
    """

    def __init__(self, config: EngineConfig) -> None:
        cache = config.cache
        assert cache.num_kv_blocks is not None, (
            "cache.num_kv_blocks must be resolved before the scheduler is made"
        )
        num_rows, layout = config.scheduler.max_num_seqs, config.cache_layout
        self.block_size = cache.block_size
        self.layout, self.num_groups = layout, len(layout.groups)
        self.num_partitions = config.parallel.num_kv_partitions
        self.tables = BlockTables(num_rows, config.max_blocks_per_seq, self.num_groups)
        # table |-> index of its first block that is not released.
        self._first_live: IntArray = np.zeros(self.num_groups * num_rows, np.int32)
        self._max_held = layout.max_held_blocks(config.scheduler.max_num_batched_tokens, cache.block_size)
        self.journal = CacheJournal(window_blocks=layout.num_hit_blocks(cache.block_size))
        self.events = CacheEvents() if cache.kv_events else NoCacheEvents()
        self.host = (
            HostTier(
                cache.num_host_kv_blocks,
                cache.block_size,
                self.num_groups,
                self.journal,
                self.events,
                self.num_partitions,
            )
            if cache.num_host_kv_blocks
            else None
        )
        stores = self.host is not None and bool(config.kv_directories)
        self.stored = StoredTier(config, self.host, self.events) if stores and self.host else NoStoredTier()
        # Those of each cache group, for each partition in turn.
        self._caches = (
            make_caches(
                cache.block_size,
                self.num_groups,
                self.journal,
                self.events,
                DEVICE_MEDIUM,
                self.num_partitions,
            )
            if cache.prefix_caching
            else []
        )
        starts = range(0, len(self._caches), self.num_groups)
        self._lookups = [
            PrefixLookup(
                layout, cache.block_size, self._caches[start : start + self.num_groups], self.host, start
            )
            for start in starts
        ]
        self._deep_lookup = (
            PrefixLookup(
                layout,
                cache.block_size,
                self._caches[: self.num_groups],
                _HostAndFiles(self.host, self.stored),
            )
            if self.stored.is_on and self.host is not None
            else None
        )
        num_slots = cache.num_state_slots if config.model.has_states else 0
        assert num_slots is not None, "cache.num_state_slots must be resolved before the scheduler is made"
        num_host_slots = cache.num_host_state_slots if num_slots else 0
        self.state_slots = StateSlots(self.tables, num_slots, num_host_slots, self._is_evicted)
        self._pool = BlockPool(cache.num_kv_blocks, self._evict, self.num_partitions)
        self._row_partitions = RowPartitions(num_rows, self.num_groups, self._pool)
        self._moves = PlannedMoves(self._pool, self.host)
        self.leases = Leases(self._pool)
        self.pulls = Pulls(self._pool, self.num_groups, config.parallel.tensor_parallel_size)
        # Blocks that the next plan fills. Its own sequences may share them, since a step writes KV before it reads
        # any, but not copy them, since a step makes all copies first.
        self._filling: set[int] = set()
        self._pending = PendingFills()
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks for sequences: all except the scratch blocks."""
        return self._pool.num_blocks

    @property
    def last_block(self) -> int:
        """Return the highest number of a block."""
        return self._pool.last_block

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
    def num_swapped_blocks(self) -> int:
        """Return the blocks moved to and from host memory by preemptions, evictions and hits."""
        return self._moves.num_swapped_blocks

    def partition_of(self, row: int) -> int:
        """Return the partition of a row's blocks."""
        return self._row_partitions.of(row)

    def partitions_of(self, rows: Iterable[int]) -> set[int]:
        """Return the partitions that have blocks of some rows."""
        return self._row_partitions.of_rows(rows)

    def num_blocks_in(self, partition: int) -> int:
        """Return the number of blocks for sequences of a partition."""
        return self._pool.num_blocks // self.num_partitions

    def num_free_in(self, partition: int) -> int:
        """Return the free blocks of a partition."""
        return self._pool.num_free_in(partition)

    def num_unheld_in(self, partition: int) -> int:
        """Return the blocks of a partition that are free now or once the steps in flight are done."""
        return self._pool.num_unheld_in(partition)

    @property
    def max_partition_use(self) -> float:
        """Return the share of its blocks that sequences hold, of the partition with the largest share."""
        held = max(self._pool.num_held_in(partition) for partition in range(self.num_partitions))
        return held / self.num_blocks_in(0)

    def lacking_partitions(self, rows: RowArray, needs: dict[int, int]) -> set[int]:
        """Return the partitions with too few free blocks for what `needs` has, and one per group and entry of `rows`.

        Args:
            needs: row |-> blocks that it lacks.
        """
        return self._row_partitions.lacking(rows, needs)

    def states(self, block_ids: range) -> bytes:
        """Return a BlockState for each block."""
        return self._pool.states(block_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_lacking_blocks(self, row: int, num_tokens: int) -> int:
        """Return the number of blocks that a row's tables lack to hold `num_tokens`."""
        return self.num_groups * max(0, self.num_blocks_for(num_tokens) - int(self.tables.lens[row]))

    def num_blocks_to_swap(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence needs to continue after its first `num_tokens`."""
        num_blocks = self.num_blocks_for(num_tokens)
        return sum(num_blocks - first for first in self._first_blocks(num_tokens))

    def num_blocks_to_fork(self, num_tokens: int) -> int:
        """Return the free blocks that a fork after `num_tokens` takes for its next token."""
        return self.num_groups * (self.num_blocks_for(num_tokens + 1) - num_tokens // self.block_size)

    def held_ids(self, row: int) -> IntArray:
        """Return the blocks that a row holds, those with the latest tokens first."""
        length = int(self.tables.lens[row])
        if not self.layout.has_windows and self.num_groups == 1:
            return self.tables.row(row)[::-1]
        ids, first = (
            self.tables.ids[row :: self.tables.num_rows, :length],
            self._first_live[row :: self.tables.num_rows],
        )
        is_live = np.arange(length) >= first[:, None]
        held: IntArray = ids[:, ::-1].T[is_live[:, ::-1].T]
        return held

    # Lookups

    def partitions_for(self, sequence: Sequence) -> range:
        """Return the partitions in which a waiting sequence may start: that of its host blocks, or any."""
        if self.num_partitions == 1 or not sequence.host_blocks:
            return range(self.num_partitions)
        assert self.host is not None
        partition = self.host.partition_of(sequence.host_blocks[0])
        return range(partition, partition + 1)

    def find_prefix(self, sequence: Sequence, partition: int = 0) -> Prefix:
        """Return the beginning of a sequence that a partition has cached, as far as the sequence can use it.

        The last known token is always computed again, since the next token is sampled from its logits.
        """
        if not self._caches:
            return Prefix(partition=partition)
        lookup = self._lookups[partition]
        tokens, num_reusable = sequence.token_ids, sequence.num_reusable_tokens
        num_full = num_reusable // self.block_size
        self._caches[0].extend(sequence, num_full)
        blocks, num_blocks = lookup.find_blocks(sequence.block_digests[:num_full])
        if self.state_slots.is_on:
            return self._find_snapshot(sequence, partition, num_blocks)
        start = num_blocks * self.block_size
        partial = None
        if start < num_reusable:
            end = min(num_reusable, start + self.block_size)
            parent = sequence.parent_of_block(num_blocks, self.block_size)
            partial = lookup.find_partial(parent, tokens[start:end], self._filling)
        return Prefix(num_blocks, blocks, partial, partition)

    def read_ahead(self, sequence: Sequence, tokens_per_s: float, now: float) -> None:
        """Have the blocks read with which a waiting sequence's cached prefix goes on in files, if that is faster.

        Args:
            tokens_per_s: measured rate of prompts; 0 if it is not known.
        """
        stored = self.stored
        if self._deep_lookup is None or stored.is_empty or sequence.lora is not None:
            return
        num_full = sequence.num_reusable_tokens // self.block_size
        self._caches[0].extend(sequence, num_full)
        digests = sequence.block_digests[:num_full]
        _, num_cached = self._lookups[0].find_blocks(digests)
        groups, num_found = self._deep_lookup.find_blocks(digests)
        num_tokens = (num_found - num_cached) * self.block_size
        if num_tokens <= 0:
            return
        most = stored.max_read_blocks(num_tokens, tokens_per_s, now)
        if most <= 0:
            return
        num_missing = sum(block == 0 for places in groups for block, on_host in places if on_host)
        if num_missing > most:  # read a shorter prefix
            groups, num_found = self._deep_lookup.find_blocks(digests[: num_cached + most // self.num_groups])
        contents = [
            (group, self._content_of(sequence, index))
            for group, places in enumerate(groups)
            for index, place in enumerate(places, num_found - len(places))
            if place == (0, True)
        ]
        if contents and len(contents) <= most:
            stored.begin_read(sequence, contents, num_tokens / tokens_per_s if tokens_per_s else 0.0, now)

    def _content_of(self, sequence: Sequence, index: int) -> CacheKey:
        """Return the content of a sequence's full block, whose digest it has."""
        parent = sequence.parent_of_block(index, self.block_size)
        start = index * self.block_size
        tokens = sequence.token_ids[start : start + self.block_size].tobytes()
        return sequence.block_digests[index], parent, tokens

    def write_behind(self, idle_s: float, now: float) -> None:
        """Have blocks written that are in no file yet, if the ranks have computed nothing for a while.

        No step may be in flight: each block is filled then. Blocks on the device are copied to the host for it.
        """
        if not self.stored.may_write(idle_s):
            return
        assert self.host is not None
        blocks = list[tuple[int, bytes, int]]()
        for group, digest in self.stored.take_candidates():
            host_block, device_block = self.host.find(group, digest), self._caches[group].find(digest)
            if host_block is not None:
                self.host.hold([host_block])
            elif device_block is not None:
                host_block = self.host.insert(group, self._caches[group].key_of(device_block))
                if host_block is not None:
                    self._moves.save([device_block], [host_block])
            if host_block is not None:
                blocks.append((group, digest, host_block))
        self.stored.begin_write(blocks, now)

    def _find_snapshot(self, sequence: Sequence, partition: int, num_shared: int) -> Prefix:
        """Return the longest cached beginning of a sequence with a snapshot of the state after it.

        Args:
            num_shared: full blocks that are cached.
        """
        lookup, digests = self._lookups[partition], sequence.block_digests[:num_shared]
        tokens = sequence.token_ids[: sequence.num_reusable_tokens]
        snapshots = self.state_slots.candidates(sequence, digests, tokens.tobytes(), self.block_size)
        for num_blocks, num_more, slot in snapshots:
            blocks, num_found = lookup.find_blocks(digests[:num_blocks])
            if num_found < num_blocks:
                continue  # a window lacks blocks that are needed here
            partial = None
            if num_more:
                start = num_blocks * self.block_size
                parent = sequence.parent_of_block(num_blocks, self.block_size)
                partial = lookup.find_tail(parent, tokens[start : start + num_more], self._filling)
                if partial is None:
                    continue
            return Prefix(num_blocks, blocks, partial, partition, slot, num_shared)
        return Prefix(partition=partition, num_shared_blocks=num_shared)

    def snapshot_ends(self, sequence: Sequence, prefix: Prefix, num_cached_tokens: int) -> tuple[int, ...]:
        """Return the numbers of tokens after which a sequence's state is to be saved; none without prefix caching."""
        if not (self.state_slots.is_on and self._caches):
            return ()
        is_reused, num_tokens = sequence.pooling is None, len(sequence.token_ids)
        return snapshot_ends(
            num_cached_tokens, prefix.num_shared_blocks, num_tokens, self.block_size, is_reused=is_reused
        )

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return the tokens of a sequence's longest cached prefix."""
        prefixes = (self.find_prefix(sequence, partition) for partition in range(self.num_partitions))
        return max(prefix.num_tokens(self.block_size) for prefix in prefixes)

    def num_blocks_to_open(self, prefix: Prefix, num_tokens: int) -> int:
        """Return the free blocks that a row with this prefix and `num_tokens` takes, including shared cached ones."""
        shared = [block_id for block_id, on_host in prefix.places() if not on_host]
        unheld = sum(map(self._pool.is_cached, shared))
        if prefix.partial is not None:
            unheld += sum(map(self._pool.is_cached, prefix.partial[0]))
        return self._num_held_blocks_for(num_tokens) - len(shared) + unheld

    def _num_held_blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence holds at once until it has `num_tokens`."""
        num_blocks = self.num_blocks_for(num_tokens)
        return sum(num_blocks if most is None else min(num_blocks, most) for most in self._max_held)

    # Allocation

    def open(self, row: int, sequence: Sequence, prefix: Prefix) -> int:
        """Put a prefix into an empty row's tables; return the number of tokens whose KV the row has then."""
        assert self._caches or not prefix.num_blocks
        self._row_partitions.assign(row, prefix.partition)
        self._hold_sources(prefix)
        tables = list[list[int]]()
        for group, places in enumerate(prefix.blocks):
            blocks = [SCRATCH_BLOCK] * (prefix.num_blocks - len(places))
            self._first_live[self._table(row, group)] = len(blocks)
            for block_id, on_host in places:
                if on_host:
                    blocks += self._moves.load([block_id])
                else:
                    self._pool.share([block_id])
                    blocks.append(block_id)
            if prefix.partial is not None:
                blocks.append(self._moves.copy(prefix.partial[0][group]))
            tables.append(blocks)
        self._put(row, tables)
        self.state_slots.open(row, prefix.snapshot)
        for group, places in enumerate(prefix.blocks):
            for index, (_, on_host) in enumerate(places, prefix.num_blocks - len(places)):
                if on_host:
                    self._publish(row, sequence, index, group)
        num_tokens = prefix.num_tokens(self.block_size)
        if self._caches:
            self.num_query_tokens += len(sequence.token_ids)
            self.num_hit_tokens += num_tokens
        return num_tokens

    def can_fork(self, source_row: int, num_tokens: int) -> bool:
        """Return whether a row still has what a fork after its first `num_tokens` needs; its state is a later one."""
        if self.state_slots.is_on:
            return False
        firsts = enumerate(self._first_blocks(num_tokens))
        return all(first >= self._first_live[self._table(source_row, group)] for group, first in firsts)

    def open_fork(self, row: int, source_row: int, num_tokens: int) -> None:
        """Give an empty row the first `num_tokens` of another: share full blocks, copy the block to write.

        The copy is part of the plan that starts the fork, since its first step writes that block (copy-on-write as in
        Kwon et al., SOSP 2023).
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        self._row_partitions.assign(row, self.partition_of(source_row))
        tables = list[list[int]]()
        for group, first in enumerate(self._first_blocks(num_tokens)):
            source, table = self._table(source_row, group), self._table(row, group)
            assert first >= self._first_live[source], f"row {source_row} has released what a fork needs"
            self._first_live[table] = first
            shared = self.tables.ids[source, first:num_full].tolist()
            self._pool.share(shared)
            blocks = [SCRATCH_BLOCK] * first + shared
            if rest:
                blocks.append(self._moves.copy(int(self.tables.ids[source, num_full])))
            tables.append(blocks)
        self._put(row, tables)
        self.state_slots.open_fork(row, source_row)

    def grow(self, row: int, num_tokens: int) -> tuple[list[int], list[int]]:
        """Extend a row's tables to hold `num_tokens`; return the table and the block of each new entry.

        The pool must have the blocks.
        """
        blocks = self._pool.allocate(self.num_lacking_blocks(row, num_tokens), self.partition_of(row))
        of_each = len(blocks) // self.num_groups
        tables = [self._table(row, group) for group in range(self.num_groups) for _ in range(of_each)]
        self.tables.append(np.array(tables, np.intp), np.array(blocks, np.int32))
        return tables, blocks

    def grow_by_one(self, rows: RowArray) -> tuple[IntArray | RowArray, IntArray]:
        """Allocate one more block in each group for each entry; return tables and blocks. The pool must have them.

        The entries of a row that repeats must be adjacent.
        """
        tables, blocks = self.tables.tables_of(rows), self._row_partitions.allocate(rows)
        self.tables.append(tables, blocks)
        return tables, blocks

    def release_behind_windows(self, rows: RowArray, positions: IntArray, fence_step: int | None) -> None:
        """Release the blocks of distinct rows that no token at `positions` or later attends to.

        Args:
            fence_step: as for BlockPool.release: steps in flight may compute earlier tokens.
        """
        for group, kind in enumerate(self.layout.groups):
            if not kind.window:
                continue
            tables = rows + group * self.tables.num_rows
            first = np.maximum(positions + 1 - kind.window, 0) // self.block_size
            passed = np.flatnonzero(first > self._first_live[tables])
            for table, end in zip(tables[passed].tolist(), first[passed].tolist(), strict=True):
                start = int(self._first_live[table])
                self._pool.release(self.tables.ids[table, start:end].tolist(), fence_step)
                self._first_live[table] = end

    def publish(self, row: int, sequence: Sequence, first_token: int, end_token: int) -> None:
        """Add the blocks that tokens `first_token` to `end_token` fill up to the prefix cache.

        Called when the computation is planned: steps run in order, and a step writes its KV before it reads any,
        so a sequence that finds a block in this plan or a later one reads it after it was written.
        """
        if not self._caches:
            return
        first, end = first_token // self.block_size, end_token // self.block_size
        self._caches[0].extend(sequence, end)
        for group in range(self.num_groups):
            for index in range(first, end):
                self._filling.add(self._publish(row, sequence, index, group))

    def save_state(self, row: int, sequence: Sequence, num_tokens: int) -> None:
        """Save the row's state after the plan's step, when it is that of `num_tokens`, whole blocks."""
        digest = sequence.block_digests[num_tokens // self.block_size - 1]
        num_saved = num_tokens - sequence.num_snapshot_tokens
        self.state_slots.save(row, (digest, digest, b""), num_saved)
        sequence.num_snapshot_tokens = num_tokens

    def blocks_at(self, rows: RowArray, index: IntArray) -> IntArray:
        """Return block number `index` of each row, [groups, rows]; the scratch block for one that was released."""
        if self.num_groups == 1 and not self.layout.has_windows:
            return self.tables.ids[rows, index][None]
        tables = rows + np.arange(self.num_groups)[:, None] * self.tables.num_rows
        is_live = index >= self._first_live[tables]
        return np.where(is_live, self.tables.ids[tables, index], SCRATCH_BLOCK)

    def publish_next(self, sequences: list[Sequence], block_ids: IntArray, blocks: list[bytes]) -> None:
        """Add the block of each sequence after those whose digests it has to the prefix cache; its KV is computed.

        Args:
            block_ids: of each group, as `blocks_at` returns them.
            blocks: the int32 tokens of each block.
        """
        if not self._caches:
            return
        chains = [sequence.block_digests for sequence in sequences]
        size = self.block_size
        parents = [
            sequence.parent_of_block(len(chain), size)
            for chain, sequence in zip(chains, sequences, strict=True)
        ]
        contents = [parent + tokens for parent, tokens in zip(parents, blocks, strict=True)]
        digests = chain_digests(contents)
        for chain, digest in zip(chains, digests, strict=True):
            chain.append(digest)
        for group, ids in enumerate(block_ids):
            for partition in range(self.num_partitions):
                is_own = (ids != SCRATCH_BLOCK) & (self._pool.partition_of(ids) == partition)
                own = np.flatnonzero(is_own).tolist()
                cache, own_ids = self._caches_of(partition)[group], ids[own].tolist()
                added = cache.insert_all([digests[at] for at in own], [contents[at] for at in own], own_ids)
                self._pool.keep_content(own_ids[index] for index in added)
                if self.stored.is_on:
                    for index in added:
                        self.stored.note(group, digests[own[index]], sequences[own[index]])
                if group == 0 and self.events.is_on:
                    for at in (own[index] for index in added):
                        content = contents[at]
                        key = digests[at], content[:DIGEST_BYTES], content[DIGEST_BYTES:]
                        self.events.add_stored(key, sequences[at], partition)

    # Blocks that travel between replicas

    def digests_of(self, sequence: Sequence, tokens: array[int], num_blocks: int) -> list[bytes]:
        """Return the digests of a sequence's first full blocks.

        Args:
            tokens: all that are known, of which the sequence may have fewer.
        """
        digests = sequence.block_digests[:num_blocks]
        self._caches[0].extend_chain(sequence, digests, tokens, num_blocks)
        return digests

    def find_lendable(self, row: int, digests: list[bytes]) -> IntArray | None:
        """Return the first full blocks of a row that another replica needs to go on after them.

        Args:
            digests: of these blocks.

        Returns:
            equally many of each group, 0 for those behind a window; None if one that is needed is gone.
        """
        num_blocks = len(digests)
        found = np.zeros((self.num_groups, num_blocks), np.int32)
        for group, first in enumerate(self._first_blocks(num_blocks * self.block_size)):
            table = self._table(row, group)
            live = max(first, int(self._first_live[table]))
            found[group, live:] = self.tables.ids[table, live:num_blocks]
            for index in range(first, min(live, num_blocks)):  # released, but perhaps cached
                block_id = self._caches_of(self.partition_of(row))[group].find(digests[index])
                if block_id is None:
                    return None
                found[group, index] = block_id
        return found.ravel()

    def find_lacking(self, sequence: Sequence, num_blocks: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Return what a sequence lacks of its first full blocks to go on after them, and the blocks that are cached.

        Args:
            sequence: has the digests of these blocks.

        Returns:
            (group, index) of each that no prefix cache of the device has, and those that it has.
        """
        lacking, cached = list[tuple[int, int]](), list[int]()
        for group, first in enumerate(self._first_blocks(num_blocks * self.block_size)):
            for index in range(first, num_blocks):
                block_id = self._caches[group].find(sequence.block_digests[index])
                if block_id is None:
                    lacking.append((group, index))
                else:
                    cached.append(block_id)
        return lacking, cached

    def publish_pulled(self, sequence: Sequence, pulled: Iterable[PulledBlock]) -> None:
        """Add blocks of a waiting sequence, which the ranks have read, to the prefix caches."""
        for block in pulled:
            key = self._content_of(sequence, block.index)
            if self._insert(self._caches[block.group], key, block.target):
                self.stored.note(block.group, key[0], sequence)
                if block.group == 0:
                    self.events.add_stored(key, sequence, partition=0)

    # Release

    def close(self, row: int, fence_step: int | None) -> None:
        """Release all of a row's blocks, the last first, so that prefixes are evicted from their ends."""
        self._pool.release(self.held_ids(row).tolist(), fence_step)
        self.state_slots.close(row, fence_step)
        self.tables.release(np.array([row], np.int32))
        self._first_live[row :: self.tables.num_rows] = 0

    def trim(self, rows: RowArray, lens: IntArray, fence_step: int | None) -> None:
        """Shorten the tables of distinct rows to `lens` blocks, which are not behind a window; release the others."""
        for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
            for group in range(self.num_groups):
                table = self._table(row, group)
                assert length >= self._first_live[table], (
                    f"row {row} is shortened to blocks that it has released"
                )
                self._pool.release(self.tables.row(table)[length:][::-1].tolist(), fence_step)
        self.tables.trim(rows, lens)

    def keep_partial(self, row: int, sequence: Sequence, index: int, last_tokens: IntArray) -> None:
        """Add a row's partly filled last block, number `index`, to the prefix cache before the row is closed.

        Args:
            last_tokens: the block's tokens whose KV is computed, fewer than a block.
        """
        if self._caches and last_tokens.size >= MIN_PARTIAL_SHARE * self.block_size:
            self._insert_last(row, sequence, index, last_tokens.tobytes())

    def keep_end(
        self, row: int, sequence: Sequence, index: int, last_tokens: IntArray, newest_step: int | None
    ) -> None:
        """Make a row's state a snapshot before the row is closed, with its last block, in a model with states.

        Args:
            index: number of the first block after those whose digests the sequence has.
            last_tokens: tokens after these blocks that are computed or in a step in flight, at most a block.
            newest_step: newest step in flight; None if none is.
        """
        if not self._caches:
            return
        tokens = last_tokens.tobytes()
        parent = sequence.parent_of_block(index, self.block_size)
        before = sequence.block_digests[index - 1] if index else sequence.root
        key = before, before, b""
        if tokens:
            blocks = self._insert_last(row, sequence, index, tokens)
            if newest_step is not None:
                self._pending.add(newest_step, blocks, [])
            digest = child_digest(parent, tokens)
            key = (digest, digest, b"") if last_tokens.size == self.block_size else (digest, parent, tokens)
        num_tokens = index * self.block_size + last_tokens.size
        if num_tokens >= MIN_SNAPSHOT_BLOCKS * self.block_size:
            self.state_slots.keep(row, key, num_tokens - sequence.num_snapshot_tokens, newest_step)

    def _insert_last(self, row: int, sequence: Sequence, index: int, tokens: bytes) -> list[int]:
        """Add a row's last block, number `index`, with its tokens to the prefix caches; return it of each group."""
        parent = sequence.parent_of_block(index, self.block_size)
        key, blocks = (child_digest(parent, tokens), parent, tokens), list[int]()
        for group, cache in enumerate(self._caches_of(self.partition_of(row))):
            table = self._table(row, group)
            if index >= self._first_live[table]:
                blocks.append(int(self.tables.ids[table, index]))
                self._insert(cache, key, blocks[-1])
        return blocks

    def flush_cache(self) -> None:
        """Forget the content of all blocks, on the device and on the host. Held blocks stay with their sequences."""
        self.keep_tiers(KvTiers.NONE)

    def confirm_fills(self, step_id: int) -> None:
        """Record that all ranks have written what the steps up to `step_id` fill."""
        self._pending.confirm(step_id)
        self.state_slots.confirm(step_id)

    def forget_unconfirmed(self) -> set[int]:
        """Forget the planned moves and the content that steps without a result may have left half written.

        Called when the ranks have failed. No row may have blocks.

        Returns:
            The host blocks whose content is void.
        """
        blocks, host_blocks = self._pending.take()
        host_blocks.update(self._moves.saved)  # of evictions without a plan
        self._moves.drop()
        self.stored.reset()
        self._filling.clear()
        for cache in self._caches:
            cache.forget_blocks(blocks)
        self._pool.forget_blocks(blocks)
        if self.host is not None:
            self.host.forget_blocks(host_blocks)
        self.state_slots.forget_unconfirmed()
        return host_blocks

    def keep_tiers(self, tiers: KvTiers) -> None:
        """Forget the content of all blocks, except in these memories."""
        if self._caches and KvTiers.DEVICE not in tiers:
            for cache in self._caches:
                cache.clear()
            self._pool.forget_content()
            self.state_slots.flush()
        if KvTiers.HOST not in tiers:
            self.state_slots.flush_host()
            if self.host is not None:
                self.host.flush_cache()

    def swap_out(self, row: int, num_tokens: int) -> list[int] | None:
        """Copy a row's first `num_tokens` to host memory; return the host blocks, or None if too few are free.

        Of a group with a window only the blocks are copied that later tokens attend to.
        """
        if self.host is None:
            return None
        host_blocks = self.host.reserve(self.num_blocks_to_swap(num_tokens), self.partition_of(row))
        if host_blocks is not None:
            end, blocks = self.num_blocks_for(num_tokens), list[int]()
            for group, first in enumerate(self._first_blocks(num_tokens)):
                table = self._table(row, group)
                assert first >= self._first_live[table], f"row {row} has released what it needs to continue"
                blocks += self.tables.ids[table, first:end].tolist()
            self._moves.save(blocks, host_blocks)
        return host_blocks

    def swap_in(self, row: int, sequence: Sequence) -> int:
        """Copy a preempted sequence's host blocks back into an empty row, and release them.

        Returns:
            the number of tokens whose KV the row has then.
        """
        host_blocks, num_tokens = sequence.host_blocks, sequence.num_host_tokens
        assert self.host is not None
        self._row_partitions.assign(row, self.host.partition_of(host_blocks[0]))
        blocks, end = self._moves.load(host_blocks), self.num_blocks_for(num_tokens)
        tables, start = list[list[int]](), 0
        for group, first in enumerate(self._first_blocks(num_tokens)):
            self._first_live[self._table(row, group)] = first
            tables.append([SCRATCH_BLOCK] * first + blocks[start : start + end - first])
            start += end - first
        self._put(row, tables)
        self._moves.release_on_host(host_blocks)
        sequence.host_blocks, sequence.num_host_tokens = [], 0
        self._publish_loaded(row, sequence, num_tokens // self.block_size)
        return num_tokens

    def drop_host_blocks(self, host_blocks: list[int]) -> None:
        """Release the host blocks of a preempted sequence that has ended."""
        if host_blocks:
            assert self.host is not None
            self.host.release(host_blocks)

    def take_transfers(self, step_id: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return and clear the block moves for step `step_id`, each [n, 2]: copies, swap_out, swap_in."""
        saved, loaded = self._moves.saved, self._moves.loaded
        if self._filling or saved or loaded:
            self._pending.add(step_id, (*self._filling, *loaded), saved)
        return self._moves.take(step_id)

    def begin_plan(self) -> None:
        """Begin another plan: the blocks that the last one fills may be copied now."""
        self._filling.clear()

    def free_fenced(self, step_id: int) -> None:
        """Free the blocks and slots whose release was deferred until step `step_id` is done."""
        self._pool.free_fenced(step_id)
        self.state_slots.free_fenced(step_id)

    def check_integrity(self, host_blocks: list[int], rows: list[int]) -> None:
        """Recount the pools against the tables. Raises AssertionError at any difference.

        Args:
            host_blocks: host blocks of preempted sequences.
            rows: that have sequences.
        """
        tables = self.tables
        self.state_slots.check_integrity(rows)
        assert tables.num_blocks == tables.lens.sum(), "the entries of the block tables are miscounted"
        lens = tables.lens.reshape(self.num_groups, -1)
        assert (lens == lens[0]).all(), "the tables of a row differ in length"
        assert (self._first_live <= tables.lens).all(), "a table has released more blocks than it has"
        held = np.concatenate([self.held_ids(row) for row in range(tables.num_rows)])
        for row in range(tables.num_rows):
            self._row_partitions.check_integrity(row, self.held_ids(row))
        held = np.concatenate(
            [held, np.array((*self._moves.held, *self.leases.held, *self.pulls.held), np.int32)]
        )
        blocks, counts = np.unique(held, return_counts=True)
        self._pool.check_integrity(dict(zip(blocks.tolist(), counts.tolist(), strict=True)))
        digests = [digest for cache in self._caches[:: self.num_groups] for digest in cache.full_digests()]
        self.journal.check_integrity(digests + (self.host.full_digests() if self.host is not None else []))
        for cache in self._caches:
            cache.check_integrity()
        if self.host is not None:
            expected: dict[int, int] = {}
            for block_id in (*host_blocks, *self._moves.held_on_host, *self.stored.held_on_host):
                expected[block_id] = expected.get(block_id, 0) + 1
            self.host.check_integrity(expected)

    # Details

    def _first_blocks(self, position: int) -> list[int]:
        """Return the index of the first block that a token at `position` attends to, in each group."""
        return [kind.first_block(position, self.block_size) for kind in self.layout.groups]

    def _hold_sources(self, prefix: Prefix) -> None:
        """Hold all blocks of a prefix until the plan is made."""
        places = prefix.places()
        device = [block_id for block_id, on_host in places if not on_host]
        if prefix.partial is not None:
            device += prefix.partial[0]
        self._moves.hold(device)
        host = [block_id for block_id, on_host in places if on_host]
        if host:
            self._moves.hold_on_host(host)

    def _table(self, row: int, group: int) -> int:
        return group * self.tables.num_rows + row

    def _put(self, row: int, tables: list[list[int]]) -> None:
        """Put blocks into the empty tables of a row, equally many in each group."""
        if tables and tables[0]:
            self.tables.put(row, np.array(tables, np.int32).ravel())

    def _publish(self, row: int, sequence: Sequence, index: int, group: int) -> int:
        """Add a row's full block `index`, whose digest the sequence has, to a group's prefix cache; return it."""
        key = self._content_of(sequence, index)
        block_id, partition = int(self.tables.ids[self._table(row, group), index]), self.partition_of(row)
        if self._insert(self._caches_of(partition)[group], key, block_id):
            self.stored.note(group, key[0], sequence)
            if group == 0:
                self.events.add_stored(key, sequence, partition)
        return block_id

    def _publish_loaded(self, row: int, sequence: Sequence, num_blocks: int) -> None:
        """Add the first full blocks of a row, which the plan loads, to the prefix caches."""
        if not self._caches:
            return
        self._caches[0].extend(sequence, num_blocks)
        for group in range(self.num_groups):
            for index in range(int(self._first_live[self._table(row, group)]), num_blocks):
                self._publish(row, sequence, index, group)

    def _caches_of(self, partition: int) -> list[PrefixCache]:
        """Return the prefix caches of a partition, those of each group."""
        start = partition * self.num_groups
        return self._caches[start : start + self.num_groups] if self.num_partitions > 1 else self._caches

    def _insert(self, cache: PrefixCache, key: CacheKey, block_id: int) -> bool:
        is_new = cache.insert(key, block_id)
        if is_new:
            self._pool.keep_content([block_id])
        return is_new

    def _is_evicted(self, digest: bytes) -> bool:
        """Return whether no memory has the block of the first cache group with a chain digest."""
        return all(cache.find(digest) is None for cache in self._caches[:: self.num_groups]) and (
            self.host is None or self.host.find(0, digest) is None
        )

    def _evict(self, block_id: int) -> None:
        """Evict a cached block: move its content to host memory if there is room."""
        index = next(index for index, cache in enumerate(self._caches) if block_id in cache)
        cache = self._caches[index]
        key = cache.key_of(block_id)
        cache.forget(block_id)
        if self.host is None or len(key[2]) < 4 * self.block_size:
            return
        host_block = self.host.insert(index, key)
        if host_block is not None:
            self._moves.save([block_id], [host_block])
            self._moves.release_on_host([host_block])
