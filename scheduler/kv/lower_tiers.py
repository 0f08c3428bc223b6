"""LowerTiers: the ways of blocks between the device, host memory and files."""

from __future__ import annotations

from collections.abc import Iterator

from ...proto.config import EngineConfig
from ...proto.stored_kv import STATE_GROUP
from ..sequences.sequence import Sequence
from .block_pool import BlockPool
from .cache_events import CacheKey
from .host_tier import HostTier
from .planned_moves import PlannedMoves
from .prefix_index import PrefixIndex
from .prefix_lookup import PrefixLookup
from .row_blocks import RowBlocks
from .state_slots import StateSlots
from .stored_tier import StoredTier


class _HostAndFiles:
    """The host tier and the files below it, for a lookup of what could be read."""

    def __init__(self, host: HostTier, stored: StoredTier) -> None:
        self._host, self._stored = host, stored

    def find(self, cache: int, digest: bytes) -> int | None:
        """Return the host block of a digest, 0 for one that is in files, or None."""
        block_id = self._host.find(cache, digest)
        return 0 if block_id is None and self._stored.has(cache, digest) else block_id


class LowerTiers:
    """Plans what moves between the tiers: evicted and preempted blocks, and those that files have or get.

    Args:
        host: None without host memory; then nothing moves.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        rows: RowBlocks,
        prefixes: PrefixIndex,
        state_slots: StateSlots,
        moves: PlannedMoves,
        host: HostTier | None,
        stored: StoredTier,
    ) -> None:
        layout = config.cache_layout
        self._pool, self._rows, self._prefixes, self._moves = pool, rows, prefixes, moves
        self._host, self._stored, self._state_slots = host, stored, state_slots
        self._block_size, self._num_groups = config.cache.block_size, len(layout.groups)
        self._deep_lookup: PrefixLookup | None = None
        if host is not None and stored.is_on:
            below, caches = _HostAndFiles(host, stored), prefixes.caches[: self._num_groups]
            self._deep_lookup = PrefixLookup(layout, self._block_size, caches, below)

    # Host memory

    def evict(self, block_id: int) -> None:
        """Evict a cached block: move its content to host memory if there is room."""
        cache, key = self._prefixes.find_content(block_id)
        if self._host is not None and len(key[2]) == 4 * self._block_size:
            host_block = self._host.insert(cache, key)
            if host_block is not None:
                self._moves.save([block_id], [host_block])
                self._moves.release_on_host([host_block])
        # After it is listed on the host: it is in one of both memories at each moment, for routers as well.
        self._prefixes.caches[cache].forget(block_id)

    def partitions_for(self, sequence: Sequence) -> range:
        """Return the partitions in which a waiting sequence may start: that of its host blocks, or any."""
        if self._pool.num_partitions == 1 or not sequence.host_blocks:
            return range(self._pool.num_partitions)
        assert self._host is not None
        partition = self._host.partition_of(sequence.host_blocks[0])
        return range(partition, partition + 1)

    def num_blocks_to_swap(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence needs to continue after its first `num_tokens`."""
        num_blocks = self._rows.num_blocks_for(num_tokens)
        return sum(num_blocks - first for first in self._rows.first_blocks(num_tokens))

    def swap_out(self, row: int, num_tokens: int) -> list[int] | None:
        """Copy a row's first `num_tokens` to host memory; return the host blocks, or None if too few are free.

        Of a group with a window only the blocks are copied that later tokens attend to.
        """
        if self._host is None:
            return None
        rows = self._rows
        host_blocks = self._host.reserve(self.num_blocks_to_swap(num_tokens), rows.partition_of(row))
        if host_blocks is not None:
            end, blocks = rows.num_blocks_for(num_tokens), list[int]()
            for group, first in enumerate(rows.first_blocks(num_tokens)):
                blocks += rows.blocks_of(row, group, first, end)
            self._moves.save(blocks, host_blocks)
        return host_blocks

    def swap_in(self, row: int, sequence: Sequence) -> int:
        """Copy a preempted sequence's host blocks back into an empty row, and release them.

        Returns:
            the number of tokens whose KV the row has then.
        """
        host_blocks, num_tokens = sequence.host_blocks, sequence.num_host_tokens
        assert self._host is not None
        firsts, end = self._rows.first_blocks(num_tokens), self._rows.num_blocks_for(num_tokens)
        loaded = iter(self._moves.load(host_blocks))
        blocks = [[next(loaded) for _ in range(first, end)] for first in firsts]
        self._rows.put(row, self._host.partition_of(host_blocks[0]), firsts, blocks)
        self._moves.release_on_host(host_blocks)
        sequence.host_blocks, sequence.num_host_tokens = [], 0
        self._prefixes.publish_loaded(row, sequence, num_tokens // self._block_size)
        return num_tokens

    def drop(self, host_blocks: list[int]) -> None:
        """Release the host blocks of a preempted sequence that has ended."""
        if host_blocks:
            assert self._host is not None
            self._host.release(host_blocks)

    # Files

    def read_ahead(self, sequence: Sequence, tokens_per_s: float, now: float) -> None:
        """Have the blocks read with which a waiting sequence's cached prefix goes on in files, if that is faster.

        Args:
            tokens_per_s: measured rate of prompts; 0 if it is not known.
        """
        stored = self._stored
        if self._deep_lookup is None or stored.is_empty:
            return
        if sequence.lora is not None and not sequence.lora.content:  # no name in files
            return
        num_cached = self._num_usable_blocks(sequence)
        digests = sequence.block_digests[: sequence.num_reusable_tokens // self._block_size]
        num_found = self._deep_lookup.find_blocks(digests)[1]
        for end in self._ends(digests, num_cached, num_found):
            num_tokens = (end - num_cached) * self._block_size
            contents = self._missing_contents(sequence, digests[:end])
            if not contents:
                return
            if stored.may_read([group for group, _ in contents], num_tokens, tokens_per_s, now):
                compute_s = num_tokens / tokens_per_s if tokens_per_s else 0.0
                stored.begin_read(sequence, contents, num_tokens, compute_s, now)
                return

    def _num_usable_blocks(self, sequence: Sequence) -> int:
        """Return how many full blocks a sequence could start with now."""
        if self._state_slots.is_on:
            return self._prefixes.num_cached_tokens(sequence) // self._block_size
        return self._prefixes.num_cached_blocks(sequence, sequence.num_reusable_tokens // self._block_size)

    def _ends(self, digests: list[bytes], num_cached: int, num_found: int) -> Iterator[int]:
        """Yield the numbers of blocks that may be worth a read, the largest first.

        Args:
            num_cached: that the sequence can start with now.
            num_found: that it can start with after reads, at most.
        """
        most = num_cached + self._stored.num_readable_blocks // self._num_groups
        if not self._state_slots.is_on:
            yield from sorted(
                {end for end in (num_found, min(num_found, most)) if end > num_cached}, reverse=True
            )
            return
        for end in range(num_found, num_cached, -1):
            digest = digests[end - 1]
            if self._state_slots.has(digest) or self._stored.has(STATE_GROUP, digest):
                yield end

    def _missing_contents(self, sequence: Sequence, digests: list[bytes]) -> list[tuple[int, CacheKey]]:
        """Return the group and content of each block, and of the state, that only files have of a prefix.

        Args:
            digests: of the prefix, all blocks of which are in some memory or file.
        """
        assert self._deep_lookup is not None
        groups, num_found = self._deep_lookup.find_blocks(digests)
        contents = [
            (group, self._prefixes.content_of(sequence, index))
            for group, places in enumerate(groups)
            for index, place in enumerate(places, num_found - len(places))
            if place == (0, True)
        ]
        if self._state_slots.is_on and not self._state_slots.has(digests[-1]):
            contents.append((STATE_GROUP, (digests[-1], digests[-1], b"")))
        return contents

    def write_behind(self, idle_s: float, now: float) -> None:
        """Have blocks written that are in no file yet, if the ranks have computed nothing for a while.

        No step may be in flight: each block is filled then. Blocks on the device are copied to the host for it.
        """
        if not self._stored.may_write(idle_s):
            return
        assert self._host is not None
        blocks = list[tuple[int, bytes, int]]()
        for group, digest in self._stored.take_candidates():
            if group == STATE_GROUP:
                host_block = self._state_slots.copy_to_host(digest)
            else:
                host_block = self._hold_on_host(self._host, group, digest)
            if host_block is not None:
                blocks.append((group, digest, host_block))
        self._stored.begin_write(blocks, now)

    def _hold_on_host(self, host: HostTier, group: int, digest: bytes) -> int | None:
        """Return the host block of a digest with one more reference, copied from the device if need be, or None."""
        host_block = host.find(group, digest)
        if host_block is not None:
            host.hold([host_block])
            return host_block
        cache = self._prefixes.caches[group]
        device_block = cache.find(digest)
        if device_block is not None:
            host_block = host.insert(group, cache.key_of(device_block))
        if device_block is not None and host_block is not None:
            self._moves.save([device_block], [host_block])
        return host_block
