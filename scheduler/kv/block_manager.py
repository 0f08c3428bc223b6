"""BlockManager: owns the blocks and states of all rows; keeps pools, prefix caches and block tables consistent."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ...proto.digests import child_digest
from ...proto.stored_kv import STATE_GROUP
from ..sequences.sequence import Sequence
from .block_pool import BlockPool
from .cache_events import CacheEvents, NoCacheEvents
from .cache_journal import CacheJournal
from .host_tier import HostTier
from .kv_tiers import KvTiers
from .leases import Leases
from .lower_tiers import LowerTiers
from .planned_moves import PendingFills, PlannedMoves
from .prefix_cache import MIN_PARTIAL_SHARE
from .prefix_index import PrefixIndex
from .prefix_lookup import Prefix
from .pulls import Pulls
from .row_blocks import RowBlocks
from .snapshot_policy import MIN_SNAPSHOT_BLOCKS, snapshot_ends
from .state_slots import StateSlots
from .stored_tier import NoStoredTier, StoredTier


class BlockManager:
    """The owner of the blocks of all rows.

    Its parts each own one truth: the pool the references, `rows` the block tables, `prefixes` the contents, `tiers`
    what moves between memories. Here is what concerns several of them: a row's life from `open` to `close`, what a
    plan moves, and what remains after a failure.

    With data-parallel attention the pool has a partition per rank. All blocks of a row are in one partition, which is
    chosen when the row is opened; prefixes are found in the blocks of one partition.

    In a model whose layers keep states a row has a state slot besides. A hit then needs a snapshot of the state after
    the same tokens, and the rest of a cached prefix is computed again.

    Attributes:
        tables: row |-> block ids and state slot; the ranks keep copies.
        state_slots: without any slot for a model without states.
        host: None without host memory.
        stored: blocks in files, which another process may have written.
        journal: changes of the set of cached prefixes, in device or host memory.
        events: the same changes with their tokens, for routers outside of quire, if there are any.
        num_query_tokens, num_hit_tokens: prompt tokens looked up in the prefix caches, and found.
        leases: blocks that left with sequences, and are held for their readers.
        pulls: blocks that ranks read from other replicas.
    """

    def __init__(self, config: EngineConfig) -> None:
        cache, layout = config.cache, config.cache_layout
        assert cache.num_kv_blocks is not None, (
            "cache.num_kv_blocks must be resolved before the scheduler is made"
        )
        self.block_size = cache.block_size
        self.layout, self.num_groups = layout, len(layout.groups)
        self.num_partitions = config.parallel.num_kv_partitions
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
        self.pool = BlockPool(
            cache.num_kv_blocks, lambda block_id: self.tiers.evict(block_id), self.num_partitions
        )
        self.rows = RowBlocks(config, self.pool)
        self.tables = self.rows.tables
        num_slots = cache.num_state_slots if config.model.has_states else 0
        assert num_slots is not None, "cache.num_state_slots must be resolved before the scheduler is made"
        num_host_slots = cache.num_host_state_slots if num_slots else 0
        self.state_slots = StateSlots(
            self.tables, num_slots, num_host_slots, lambda digest: self.prefixes.is_evicted(digest)
        )
        self.stored: StoredTier = NoStoredTier()
        if self.host is not None and config.kv_directories:
            self.stored = StoredTier(config, self.host, self.state_slots, self.events)
        self.prefixes = PrefixIndex(
            config,
            self.pool,
            self.rows,
            self.state_slots,
            self.host,
            self.stored,
            self.journal,
            self.events,
        )
        self._moves = PlannedMoves(self.pool, self.host)
        self.tiers = LowerTiers(
            config,
            self.pool,
            self.rows,
            self.prefixes,
            self.state_slots,
            self._moves,
            self.host,
            self.stored,
        )
        self.leases = Leases(self.pool, self.state_slots)
        self.pulls = Pulls(self.pool, self.state_slots, self.num_groups, config.parallel.tensor_parallel_size)
        self._pending = PendingFills()
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks for sequences: all except the scratch blocks."""
        return self.pool.num_blocks

    @property
    def num_held_blocks(self) -> int:
        return self.pool.num_held

    @property
    def num_cached_blocks(self) -> int:
        return self.pool.num_cached

    @property
    def num_fenced_blocks(self) -> int:
        return self.pool.num_fenced

    @property
    def num_swapped_blocks(self) -> int:
        """Return the blocks moved to and from host memory by preemptions, evictions and hits."""
        return self._moves.num_swapped_blocks

    @property
    def has_loads(self) -> bool:
        """Return whether the next plan fills blocks or states from host memory."""
        return bool(self._moves.loaded) or self.state_slots.has_loads

    # Rows

    def num_blocks_to_open(self, prefix: Prefix, num_tokens: int) -> int:
        """Return the free blocks that a row with this prefix and `num_tokens` takes, including shared cached ones."""
        shared = [block_id for block_id, on_host in prefix.places() if not on_host]
        unheld = sum(map(self.pool.is_cached, shared))
        if prefix.partial is not None:
            unheld += sum(map(self.pool.is_cached, prefix.partial[0]))
        return self.rows.max_held_blocks(num_tokens) - len(shared) + unheld

    def open(self, row: int, sequence: Sequence, prefix: Prefix) -> int:
        """Put a prefix into an empty row's tables; return the number of tokens whose KV the row has then."""
        assert self.prefixes.is_on or not prefix.num_blocks
        self._hold_sources(prefix)
        firsts, tables = [prefix.num_blocks - len(places) for places in prefix.blocks], list[list[int]]()
        for group, places in enumerate(prefix.blocks):
            blocks = list[int]()
            for block_id, on_host in places:
                if on_host:
                    blocks += self._moves.load([block_id])
                else:
                    self.pool.share([block_id])
                    blocks.append(block_id)
            if prefix.partial is not None:
                blocks.append(self._moves.copy(prefix.partial[0][group]))
            tables.append(blocks)
        self.rows.put(row, prefix.partition, firsts, tables)
        self.state_slots.open(row, prefix.snapshot)
        for group, places in enumerate(prefix.blocks):
            for index, (_, on_host) in enumerate(places, firsts[group]):
                if on_host:
                    self.prefixes.publish_block(row, sequence, index, group)
        num_tokens = prefix.num_tokens(self.block_size)
        if self.prefixes.is_on:
            self.num_query_tokens += len(sequence.token_ids)
            self.num_hit_tokens += num_tokens
        return num_tokens

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

    def lend_cached(self, sequence: Sequence, digests: list[bytes]) -> tuple[IntArray, bool]:
        """Return the cached beginning of a chain in blocks of the device, and whether the next plan loads some.

        Blocks in host memory are loaded if there is room for all of them; otherwise the prefix ends before them.

        Returns:
            equally many blocks of each group, 0 for those behind a window.
        """
        groups = self.prefixes.find_cached(digests, on_host=True)
        places = [place for places in groups for place in places]
        host = [block_id for block_id, is_on_host in places if is_on_host]
        device = [block_id for block_id, is_on_host in places if not is_on_host]
        unheld = sum(map(self.pool.is_cached, device))
        if host and len(host) + unheld > self.pool.num_free_in(0):
            groups, host = self.prefixes.find_cached(digests, on_host=False), []
        num_blocks = max(map(len, groups), default=0)
        table = np.zeros((self.num_groups, num_blocks), np.int32)
        if host:
            self._moves.hold(device)
            self._moves.hold_on_host(host)
        filled = self._moves.load(host) if host else []
        loaded = iter(filled)
        for group, of_group in enumerate(groups):
            for index, (block_id, is_on_host) in enumerate(of_group, num_blocks - len(of_group)):
                table[group, index] = next(loaded) if is_on_host else block_id
                if is_on_host:
                    self.prefixes.publish_copy(sequence, index, group, int(table[group, index]))
        if filled:
            self._moves.hold(filled)
            self.pool.release(filled, None)
        return table.ravel(), bool(host)

    def num_blocks_to_fork(self, num_tokens: int) -> int:
        """Return the free blocks that a fork after `num_tokens` takes for its next token."""
        return self.num_groups * (self.rows.num_blocks_for(num_tokens + 1) - num_tokens // self.block_size)

    def can_fork(self, source_row: int, num_tokens: int) -> bool:
        """Return whether a row still has what a fork after its first `num_tokens` needs; its state is a later one."""
        if self.state_slots.is_on:
            return False
        firsts = enumerate(self.rows.first_blocks(num_tokens))
        return all(first >= self.rows.first_live(source_row, group) for group, first in firsts)

    def open_fork(self, row: int, source_row: int, num_tokens: int) -> None:
        """Give an empty row the first `num_tokens` of another: share full blocks, copy the block to write.

        The copy is part of the plan that starts the fork, since its first step writes that block (copy-on-write as in
        Kwon et al., SOSP 2023).
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        firsts, tables = self.rows.first_blocks(num_tokens), list[list[int]]()
        for group, first in enumerate(firsts):
            blocks = self.rows.blocks_of(source_row, group, first, num_full)
            self.pool.share(blocks)
            if rest:
                blocks.append(self._moves.copy(self.rows.block_of(source_row, group, num_full)))
            tables.append(blocks)
        self.rows.put(row, self.rows.partition_of(source_row), firsts, tables)
        self.state_slots.open_fork(row, source_row)

    def snapshot_ends(self, sequence: Sequence, prefix: Prefix, num_cached_tokens: int) -> tuple[int, ...]:
        """Return the numbers of tokens after which a sequence's state is to be saved; none without prefix caching."""
        if not (self.state_slots.is_on and self.prefixes.is_on):
            return ()
        is_reused, num_tokens = sequence.pooling is None, len(sequence.token_ids)
        return snapshot_ends(
            num_cached_tokens, prefix.num_shared_blocks, num_tokens, self.block_size, is_reused=is_reused
        )

    def save_state(self, row: int, sequence: Sequence, num_tokens: int, tail: int) -> None:
        """Save the row's state in the plan's step after `num_tokens`, whole blocks; the step computes `tail` more."""
        digest = sequence.block_digests[num_tokens // self.block_size - 1]
        num_saved = num_tokens - sequence.num_snapshot_tokens
        self.state_slots.save(row, (digest, digest, b""), num_saved, tail)
        self.stored.note(STATE_GROUP, digest, sequence)
        sequence.num_snapshot_tokens = num_tokens

    def keep_partial(self, row: int, sequence: Sequence, index: int, last_tokens: IntArray) -> None:
        """Add a row's partly filled last block, number `index`, to the prefix cache before the row is closed.

        Args:
            last_tokens: the block's tokens whose KV is computed, fewer than a block.
        """
        if self.prefixes.is_on and last_tokens.size >= MIN_PARTIAL_SHARE * self.block_size:
            self.prefixes.insert_last(row, sequence, index, last_tokens.tobytes())

    def keep_end(
        self, row: int, sequence: Sequence, index: int, last_tokens: IntArray, newest_step: int | None
    ) -> None:
        """Make a row's state a snapshot before the row is closed, with its last block, in a model with states.

        Args:
            index: number of the first block after those whose digests the sequence has.
            last_tokens: tokens after these blocks that are computed or in a step in flight, at most a block.
            newest_step: newest step in flight; None if none is.
        """
        if not self.prefixes.is_on:
            return
        tokens = last_tokens.tobytes()
        parent = sequence.parent_of_block(index, self.block_size)
        before = sequence.block_digests[index - 1] if index else sequence.root
        key = before, before, b""
        if tokens:
            blocks = self.prefixes.insert_last(row, sequence, index, tokens)
            if newest_step is not None:
                self._pending.add(newest_step, blocks, [])
            digest = child_digest(parent, tokens)
            key = (digest, digest, b"") if last_tokens.size == self.block_size else (digest, parent, tokens)
        num_tokens = index * self.block_size + last_tokens.size
        if num_tokens >= MIN_SNAPSHOT_BLOCKS * self.block_size:
            self.state_slots.keep(row, key, num_tokens - sequence.num_snapshot_tokens, newest_step)
            if not key[2]:  # files have no partly filled blocks
                self.stored.note(STATE_GROUP, key[0], sequence)

    def can_swap_out(self) -> bool:
        """Return whether host memory has room for the state of a row, if it has one."""
        return not self.state_slots.is_on or self.state_slots.has_host_room

    def swap_out(self, row: int, sequence: Sequence, num_tokens: int) -> None:
        """Copy a row's first `num_tokens` to host memory, if there is room, before the row is closed.

        The state, if it has one, must be that after these tokens once the steps in flight are done.
        """
        if not self.can_swap_out():
            return
        host_blocks = self.tiers.swap_out(row, num_tokens)
        if not host_blocks:
            return
        sequence.host_blocks, sequence.num_host_tokens = host_blocks, num_tokens
        if self.state_slots.is_on:
            sequence.host_state = self.state_slots.swap_out(row)

    def swap_in(self, row: int, sequence: Sequence) -> int:
        """Copy what `swap_out` saved into an empty row; return the number of tokens that the row has then."""
        if self.state_slots.is_on:
            self.state_slots.swap_in(row, sequence.host_state)
            sequence.host_state = 0
        return self.tiers.swap_in(row, sequence)

    def drop_swapped(self, sequence: Sequence) -> None:
        """Forget what `swap_out` saved, if it saved anything."""
        if sequence.host_state:
            self.state_slots.drop(sequence.host_state)
        self.tiers.drop(sequence.host_blocks)
        sequence.host_blocks, sequence.num_host_tokens, sequence.host_state = [], 0, 0

    def close(self, row: int, fence_step: int | None) -> None:
        """Release all of a row's blocks, the last first, so that prefixes are evicted from their ends."""
        self.state_slots.close(row, fence_step)
        self.rows.release(row, fence_step)

    # Plans and failures

    def begin_plan(self) -> None:
        """Begin another plan: the blocks that the last one fills may be copied now."""
        self.prefixes.filling.clear()

    def take_transfers(self, step_id: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return and clear the block moves for step `step_id`, each [n, 2]: copies, swap_out, swap_in."""
        saved, loaded, filling = self._moves.saved, self._moves.loaded, self.prefixes.filling
        if filling or saved or loaded:
            self._pending.add(step_id, (*filling, *loaded), saved)
        return self._moves.take(step_id)

    def confirm_fills(self, step_id: int) -> None:
        """Record that all ranks have written what the steps up to `step_id` fill."""
        self._pending.confirm(step_id)
        self.state_slots.confirm(step_id)

    def free_fenced(self, step_id: int) -> None:
        """Free the blocks and slots whose release was deferred until step `step_id` is done."""
        self.pool.free_fenced(step_id)
        self.state_slots.free_fenced(step_id)

    def flush_cache(self) -> None:
        """Forget the content of all blocks, on the device and on the host. Held blocks stay with their sequences."""
        self.keep_tiers(KvTiers.NONE)

    def keep_tiers(self, tiers: KvTiers) -> None:
        """Forget the content of all blocks, except in these memories."""
        if self.prefixes.is_on and KvTiers.DEVICE not in tiers:
            self.prefixes.clear()
            self.state_slots.flush()
        if KvTiers.HOST not in tiers:
            self.state_slots.flush_host()
            if self.host is not None:
                self.host.flush_cache()

    def forget_unconfirmed(self) -> tuple[set[int], set[int]]:
        """Forget the planned moves and the content that steps without a result may have left half written.

        Called when the ranks have failed. No row may have blocks.

        Returns:
            The blocks and the slots in host memory whose content is void.
        """
        blocks, host_blocks = self._pending.take()
        host_blocks.update(self._moves.saved)  # of evictions without a plan
        self._moves.drop()
        self.stored.reset()
        self.prefixes.filling.clear()
        self.prefixes.forget_blocks(blocks)
        if self.host is not None:
            self.host.forget_blocks(host_blocks)
        return host_blocks, self.state_slots.forget_unconfirmed()

    def check_integrity(self, host_blocks: list[int], host_states: list[int], rows: list[int]) -> None:
        """Recount the pools against the tables. Raises AssertionError at any difference.

        Args:
            host_blocks, host_states: blocks and slots in host memory of preempted sequences.
            rows: that have sequences.
        """
        in_transfers = [*self.leases.held_states, *self.pulls.held_states]
        self.state_slots.check_integrity(rows, host_states, self.stored.held_states, in_transfers)
        self.rows.check_integrity()
        held = Counter((*self._moves.held, *self.leases.held, *self.pulls.held))
        for row in range(self.tables.num_rows):
            held.update(self.rows.held_ids(row).tolist())
        self.pool.check_integrity(held)
        host_digests = self.host.full_digests() if self.host is not None else []
        self.journal.check_integrity(self.prefixes.full_digests() + host_digests)
        self.prefixes.check_integrity()
        if self.host is not None:
            on_host = (*host_blocks, *self._moves.held_on_host, *self.stored.held_on_host)
            self.host.check_integrity(Counter(on_host))
