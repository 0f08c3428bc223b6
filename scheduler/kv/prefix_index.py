"""PrefixIndex: which blocks have the KV of which prefix, in all partitions and cache groups of the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ...proto.digests import DIGEST_BYTES, chain_digests, child_digest
from ..sequences.sequence import Sequence
from .block_pool import SCRATCH_BLOCK, BlockPool
from .cache_events import DEVICE_MEDIUM, CacheEvents, CacheKey
from .cache_journal import CacheJournal
from .host_tier import HostTier
from .prefix_cache import PrefixCache, make_caches
from .prefix_lookup import Prefix, PrefixLookup
from .pulls import PulledBlock
from .row_blocks import RowBlocks
from .state_slots import StateSlots
from .stored_tier import StoredTier


class PrefixIndex:
    """The prefix caches of the device, one for each cache group of each partition, and the lookups in them.

    A hit may go on in host memory. In a model whose layers keep states it needs a snapshot of the state after the
    same tokens besides, and the rest of a cached prefix is computed again.

    Args:
        host: None without host memory.
        stored: is told of blocks that files may get.
        journal, events: see make_caches.

    Attributes:
        caches: of each cache group, for each partition in turn; empty without prefix caching.
        filling: blocks that the next plan fills. Its own sequences may share them, since a step writes KV before it
            reads any, but not copy them, since a step makes all copies first.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        rows: RowBlocks,
        state_slots: StateSlots,
        host: HostTier | None,
        stored: StoredTier,
        journal: CacheJournal,
        events: CacheEvents,
    ) -> None:
        layout, size = config.cache_layout, config.cache.block_size
        self._pool, self._rows, self._state_slots = pool, rows, state_slots
        self._host, self._stored, self._events = host, stored, events
        self._block_size, self._num_groups = size, len(layout.groups)
        self.caches: list[PrefixCache] = []
        if config.cache.prefix_caching:
            self.caches = make_caches(
                size, self._num_groups, journal, events, DEVICE_MEDIUM, pool.num_partitions
            )
        starts = range(0, len(self.caches), self._num_groups)
        self._lookups = [
            PrefixLookup(layout, size, self.caches[start : start + self._num_groups], host, start)
            for start in starts
        ]
        self._device_lookup = PrefixLookup(layout, size, self.caches[: self._num_groups], None)
        self.filling: set[int] = set()

    @property
    def is_on(self) -> bool:
        return bool(self.caches)

    # Lookups

    def find(self, sequence: Sequence, partition: int = 0) -> Prefix:
        """Return the beginning of a sequence that a partition has cached, as far as the sequence can use it.

        The last known token is always computed again, since the next token is sampled from its logits.
        """
        if not self.caches:
            return Prefix(partition=partition)
        lookup = self._lookups[partition]
        tokens, num_reusable = sequence.token_ids, sequence.num_reusable_tokens
        num_full = num_reusable // self._block_size
        self.caches[0].extend(sequence, num_full)
        blocks, num_blocks = lookup.find_blocks(sequence.block_digests[:num_full])
        if self._state_slots.is_on:
            return self._find_snapshot(sequence, partition, num_blocks)
        start = num_blocks * self._block_size
        partial = None
        if start < num_reusable:
            end = min(num_reusable, start + self._block_size)
            parent = sequence.parent_of_block(num_blocks, self._block_size)
            partial = lookup.find_partial(parent, tokens[start:end], self.filling)
        return Prefix(num_blocks, blocks, partial, partition)

    def _find_snapshot(self, sequence: Sequence, partition: int, num_shared: int) -> Prefix:
        """Return the longest cached beginning of a sequence with a snapshot of the state after it.

        Args:
            num_shared: full blocks that are cached.
        """
        lookup, digests = self._lookups[partition], sequence.block_digests[:num_shared]
        tokens = sequence.token_ids[: sequence.num_reusable_tokens]
        snapshots = self._state_slots.candidates(sequence, digests, tokens.tobytes(), self._block_size)
        for num_blocks, num_more, slot in snapshots:
            blocks, num_found = lookup.find_blocks(digests[:num_blocks])
            if num_found < num_blocks:
                continue  # a window lacks blocks that are needed here
            partial = None
            if num_more:
                start = num_blocks * self._block_size
                parent = sequence.parent_of_block(num_blocks, self._block_size)
                partial = lookup.find_tail(parent, tokens[start : start + num_more], self.filling)
                if partial is None:
                    continue
            return Prefix(num_blocks, blocks, partial, partition, slot, num_shared)
        return Prefix(partition=partition, num_shared_blocks=num_shared)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return the tokens of a sequence's longest cached prefix."""
        prefixes = (self.find(sequence, partition) for partition in range(self._pool.num_partitions))
        return max(prefix.num_tokens(self._block_size) for prefix in prefixes)

    def num_cached_blocks(self, sequence: Sequence, num_blocks: int) -> int:
        """Return how many of a sequence's first full blocks are cached without a gap in the first partition."""
        self.caches[0].extend(sequence, num_blocks)
        return self._lookups[0].find_blocks(sequence.block_digests[:num_blocks])[1]

    def digests_of(self, sequence: Sequence, tokens: array[int], num_blocks: int) -> list[bytes]:
        """Return the digests of a sequence's first full blocks.

        Args:
            tokens: all that are known, of which the sequence may have fewer.
        """
        digests = sequence.block_digests[:num_blocks]
        self.caches[0].extend_chain(sequence, digests, tokens, num_blocks)
        return digests

    def content_of(self, sequence: Sequence, index: int) -> CacheKey:
        """Return the content of a sequence's full block, whose digest it has."""
        parent = sequence.parent_of_block(index, self._block_size)
        start = index * self._block_size
        tokens = sequence.token_ids[start : start + self._block_size].tobytes()
        return sequence.block_digests[index], parent, tokens

    def find_lendable(self, row: int, digests: list[bytes]) -> IntArray | None:
        """Return the first full blocks of a row that another replica needs to go on after them.

        Args:
            digests: of these blocks.

        Returns:
            equally many of each group, 0 for those behind a window; None if one that is needed is gone.
        """
        num_blocks, rows = len(digests), self._rows
        caches = self._caches_of(rows.partition_of(row))
        found = np.zeros((self._num_groups, num_blocks), np.int32)
        for group, first in enumerate(rows.first_blocks(num_blocks * self._block_size)):
            live = max(first, rows.first_live(row, group))
            found[group, live:] = rows.blocks_of(row, group, live, num_blocks)
            for index in range(first, min(live, num_blocks)):  # released, but perhaps cached
                block_id = caches[group].find(digests[index])
                if block_id is None:
                    return None
                found[group, index] = block_id
        return found.ravel()

    def find_cached(self, digests: list[bytes], *, on_host: bool) -> tuple[tuple[tuple[int, bool], ...], ...]:
        """Return the blocks of the longest cached prefix of a chain in the first partition, as in Prefix.

        Args:
            on_host: those in host memory count.
        """
        return (self._lookups[0] if on_host else self._device_lookup).find_blocks(digests)[0]

    def find_lacking(self, sequence: Sequence, num_blocks: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Return what a sequence lacks of its first full blocks to go on after them, and the blocks that are cached.

        Args:
            sequence: has the digests of these blocks.

        Returns:
            (group, index) of each that no prefix cache of the device has, and those that it has.
        """
        lacking, cached = list[tuple[int, int]](), list[int]()
        for group, first in enumerate(self._rows.first_blocks(num_blocks * self._block_size)):
            for index in range(first, num_blocks):
                block_id = self.caches[group].find(sequence.block_digests[index])
                if block_id is None:
                    lacking.append((group, index))
                else:
                    cached.append(block_id)
        return lacking, cached

    def is_evicted(self, digest: bytes) -> bool:
        """Return whether no memory has the block of the first cache group with a chain digest."""
        return all(cache.find(digest) is None for cache in self.caches[:: self._num_groups]) and (
            self._host is None or self._host.find(0, digest) is None
        )

    # Publication

    def publish(self, row: int, sequence: Sequence, first_token: int, end_token: int) -> None:
        """Add the blocks that tokens `first_token` to `end_token` fill up.

        Called when the computation is planned: steps run in order, and a step writes its KV before it reads any,
        so a sequence that finds a block in this plan or a later one reads it after it was written.
        """
        if not self.caches:
            return
        first, end = first_token // self._block_size, end_token // self._block_size
        self.caches[0].extend(sequence, end)
        for group in range(self._num_groups):
            for index in range(first, end):
                self.filling.add(self.publish_block(row, sequence, index, group))

    def publish_block(self, row: int, sequence: Sequence, index: int, group: int) -> int:
        """Add a row's full block `index`, whose digest the sequence has, of a group; return it."""
        block_id, partition = self._rows.block_of(row, group, index), self._rows.partition_of(row)
        self._publish_content(sequence, index, group, block_id, partition)
        return block_id

    def publish_loaded(self, row: int, sequence: Sequence, num_blocks: int) -> None:
        """Add the first full blocks of a row, which the plan loads."""
        if not self.caches:
            return
        self.caches[0].extend(sequence, num_blocks)
        for group in range(self._num_groups):
            for index in range(self._rows.first_live(row, group), num_blocks):
                self.publish_block(row, sequence, index, group)

    def publish_pulled(self, sequence: Sequence, pulled: Iterable[PulledBlock]) -> None:
        """Add blocks of a waiting sequence, which the ranks have read."""
        for block in pulled:
            self._publish_content(sequence, block.index, block.group, block.target, partition=0)

    def publish_copy(self, sequence: Sequence, index: int, group: int, block_id: int) -> None:
        """Add a block of the first partition that the next plan fills with a sequence's full block `index`."""
        self._publish_content(sequence, index, group, block_id, partition=0)

    def publish_next(self, sequences: list[Sequence], block_ids: IntArray, blocks: list[bytes]) -> None:
        """Add the block of each sequence after those whose digests it has; its KV is computed.

        Args:
            block_ids: of each group, as `RowBlocks.blocks_at` returns them.
            blocks: the int32 tokens of each block.
        """
        if not self.caches:
            return
        chains = [sequence.block_digests for sequence in sequences]
        size = self._block_size
        parents = [
            sequence.parent_of_block(len(chain), size)
            for chain, sequence in zip(chains, sequences, strict=True)
        ]
        contents = [parent + tokens for parent, tokens in zip(parents, blocks, strict=True)]
        digests = chain_digests(contents)
        for chain, digest in zip(chains, digests, strict=True):
            chain.append(digest)
        for group, ids in enumerate(block_ids):
            for partition in range(self._pool.num_partitions):
                is_own = (ids != SCRATCH_BLOCK) & (self._pool.partition_of(ids) == partition)
                own = np.flatnonzero(is_own).tolist()
                cache, own_ids = self._caches_of(partition)[group], ids[own].tolist()
                added = cache.insert_all([digests[at] for at in own], [contents[at] for at in own], own_ids)
                self._pool.keep_content(own_ids[index] for index in added)
                if self._stored.is_on:
                    for index in added:
                        self._stored.note(group, digests[own[index]], sequences[own[index]])
                if group == 0 and self._events.is_on:
                    for at in (own[index] for index in added):
                        content = contents[at]
                        key = digests[at], content[:DIGEST_BYTES], content[DIGEST_BYTES:]
                        self._events.add_stored(key, sequences[at], len(chains[at]) - 1, partition)

    def insert_last(self, row: int, sequence: Sequence, index: int, tokens: bytes) -> list[int]:
        """Add a row's last block, number `index`, with its tokens; return it of each group."""
        parent = sequence.parent_of_block(index, self._block_size)
        key, blocks = (child_digest(parent, tokens), parent, tokens), list[int]()
        partition = self._rows.partition_of(row)
        for group in range(self._num_groups):
            if index >= self._rows.first_live(row, group):
                blocks.append(self._rows.block_of(row, group, index))
                self._insert(key, sequence, index, group, blocks[-1], partition)
        return blocks

    # Removal

    def find_content(self, block_id: int) -> tuple[int, CacheKey]:
        """Return the number of a cached block's cache, and its content."""
        number = next(number for number, cache in enumerate(self.caches) if block_id in cache)
        return number, self.caches[number].key_of(block_id)

    def forget_blocks(self, block_ids: set[int]) -> None:
        """Remove those of the blocks that are cached."""
        for cache in self.caches:
            cache.forget_blocks(block_ids)
        self._pool.forget_blocks(block_ids)

    def clear(self) -> None:
        """Remove every block."""
        for cache in self.caches:
            cache.clear()
        self._pool.forget_content()

    def full_digests(self) -> list[bytes]:
        """Return the digests of all cached full blocks of the first cache group, in each partition."""
        return [digest for cache in self.caches[:: self._num_groups] for digest in cache.full_digests()]

    def check_integrity(self) -> None:
        """Raise AssertionError unless all maps agree."""
        for cache in self.caches:
            cache.check_integrity()

    # Details

    def _caches_of(self, partition: int) -> list[PrefixCache]:
        """Return the prefix caches of a partition, those of each group."""
        start = partition * self._num_groups
        return self.caches[start : start + self._num_groups] if self._pool.num_partitions > 1 else self.caches

    def _publish_content(
        self, sequence: Sequence, index: int, group: int, block_id: int, partition: int
    ) -> None:
        """Add a block of a partition that has or gets the KV of a sequence's full block `index`."""
        self._insert(self.content_of(sequence, index), sequence, index, group, block_id, partition)

    def _insert(
        self, key: CacheKey, sequence: Sequence, index: int, group: int, block_id: int, partition: int
    ) -> None:
        """Add a block unless its content is cached already. Of a full one, files and routers are told."""
        if not self._caches_of(partition)[group].insert(key, block_id):
            return
        self._pool.keep_content([block_id])
        if len(key[2]) == 4 * self._block_size:
            self._stored.note(group, key[0], sequence)
            if group == 0:
                self._events.add_stored(key, sequence, index, partition)
