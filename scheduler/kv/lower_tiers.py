"""LowerTiers: the ways of blocks between the device, host memory and files."""

from __future__ import annotations

from ...proto.config import EngineConfig
from ..sequences.sequence import Sequence
from .block_pool import BlockPool
from .host_tier import HostTier
from .planned_moves import PlannedMoves
from .prefix_index import PrefixIndex
from .prefix_lookup import PrefixLookup
from .row_blocks import RowBlocks
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
        moves: PlannedMoves,
        host: HostTier | None,
        stored: StoredTier,
    ) -> None:
        layout = config.cache_layout
        self._pool, self._rows, self._prefixes, self._moves = pool, rows, prefixes, moves
        self._host, self._stored = host, stored
        self._block_size, self._num_groups = config.cache.block_size, len(layout.groups)
        self._deep_lookup: PrefixLookup | None = None
        if host is not None and stored.is_on:
            below, caches = _HostAndFiles(host, stored), prefixes.caches[: self._num_groups]
            self._deep_lookup = PrefixLookup(layout, self._block_size, caches, below)

    # Host memory

    def evict(self, block_id: int) -> None:
        """Evict a cached block: move its content to host memory if there is room."""
        cache, key = self._prefixes.evict(block_id)
        if self._host is None or len(key[2]) < 4 * self._block_size:
            return
        host_block = self._host.insert(cache, key)
        if host_block is not None:
            self._moves.save([block_id], [host_block])
            self._moves.release_on_host([host_block])

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
        if self._deep_lookup is None or stored.is_empty or sequence.lora is not None:
            return
        num_full = sequence.num_reusable_tokens // self._block_size
        num_cached = self._prefixes.num_cached_blocks(sequence, num_full)
        digests = sequence.block_digests[:num_full]
        groups, num_found = self._deep_lookup.find_blocks(digests)
        num_tokens = (num_found - num_cached) * self._block_size
        if num_tokens <= 0:
            return
        most = stored.max_read_blocks(num_tokens, tokens_per_s, now)
        if most <= 0:
            return
        num_missing = sum(block == 0 for places in groups for block, on_host in places if on_host)
        if num_missing > most:  # read a shorter prefix
            groups, num_found = self._deep_lookup.find_blocks(
                digests[: num_cached + most // self._num_groups]
            )
        contents = [
            (group, self._prefixes.content_of(sequence, index))
            for group, places in enumerate(groups)
            for index, place in enumerate(places, num_found - len(places))
            if place == (0, True)
        ]
        if contents and len(contents) <= most:
            stored.begin_read(sequence, contents, num_tokens / tokens_per_s if tokens_per_s else 0.0, now)

    def write_behind(self, idle_s: float, now: float) -> None:
        """Have blocks written that are in no file yet, if the ranks have computed nothing for a while.

        No step may be in flight: each block is filled then. Blocks on the device are copied to the host for it.
        """
        if not self._stored.may_write(idle_s):
            return
        assert self._host is not None
        blocks = list[tuple[int, bytes, int]]()
        for group, digest in self._stored.take_candidates():
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
