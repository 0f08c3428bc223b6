"""StoredTier: blocks that the ranks keep in files, which outlive the process. Pure: no clock, no files.

The scheduler decides what is written and read; the ranks report what they have. A block is present if every rank has
its part of it, in any tier. What is read goes into host blocks, and is found by the next lookup as what was evicted
to them; what is written comes from host blocks. So the swaps of the host tier are the only way into the device.

A sequence whose prefix goes on in files waits for a read that was ordered for it, until its *ticket* is over: all
blocks were read, some failed, or the time is over in which its tokens would have been computed. Then it starts with
what there is. Host blocks of an order stay held until all ranks have reported it, however late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from ...proto.config import EngineConfig
from ...proto.stored_kv import TIERS, StoredOrder, StoredReport, block_key, split_keys
from ..sequences.sequence import Sequence
from .cache_events import STORED_MEDIA, CacheEvents, CacheKey
from .host_tier import HostTier

# Blocks of one write, of which one is under way at a time: a slow file system accumulates nothing.
BLOCKS_PER_WRITE = 256
# Time without a step after which the machine is idle, and blocks are written.
IDLE_S = 0.5
# Steps without anything to compute are planned for news of an order that is younger than this, and for the ranks'
# first reports of what they have. News of older ones come with the steps of requests.
POLL_S = 10.0
INDEX_POLL_S = 60.0
# An idle replica asks its ranks this often what other servers have written.
SHARED_POLL_S = 10.0
# Bounds of the time for which a sequence waits for a read, and the time while no rate of prompts is known.
MIN_WAIT_S, MAX_WAIT_S, FIRST_WAIT_S = 0.05, 10.0, 2.0
# A read costs this beside its blocks: two steps that only report.
READ_OVERHEAD_S = 0.005
# After this time a measured rate that forbids reads is tried again.
RETRY_S = 60.0
# Blocks that are remembered to be written.
MAX_CANDIDATES = 1 << 16
# The measured rate is of about this many blocks: a short read hardly changes it.
_RATE_BLOCKS = 1024


@dataclass(slots=True, eq=False)
class _Order:
    """An order that not all ranks have reported.

    Attributes:
        contents: cache group and content of each block that is read; empty for a write.
        ranks: that have not reported it.
        rates: blocks/s of the ranks that have.
    """

    order: StoredOrder
    contents: list[tuple[int, CacheKey]]
    ranks: set[int]
    begun_at: float
    failed: set[int] = field(default_factory=set)
    rates: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Ticket:
    """A sequence's wait for blocks.

    Attributes:
        orders: that are under way.
        held: host blocks that were read for it, one reference each.
        num_tokens: tokens of the blocks that were read.
    """

    sequence: Sequence
    orders: set[int]
    deadline: float
    held: list[int] = field(default_factory=list)
    num_tokens: int = 0
    is_parked: bool = False


class StoredTier:
    """The files of all ranks, as far as they have reported them.

    Args:
        host: of the blocks that are read and written.
        events: are told of blocks that every rank has in a tier.

    Attributes:
        num_read_blocks, num_written_blocks: on all ranks, as often as they were read or written.
        num_read_bytes: of all ranks together.
        num_hit_tokens: tokens that sequences began with which were read for them.
        num_corrupt_blocks: blocks of a rank whose content was not what their names say.
        num_failed_reads: blocks that were wanted, and some rank did not have.
        num_late_reads: sequences that did not wait for theirs any longer.
        read_blocks_per_s: of the slowest rank, measured; 0 before the first read.
        tier_bytes: of the files in each tier's directory.
    """

    is_on = True

    def __init__(self, config: EngineConfig, host: HostTier, events: CacheEvents) -> None:
        self._host, self._events = host, events
        self._block_size = config.cache.block_size
        self._num_ranks = config.parallel.num_ranks
        self._tiers = [number for number, place in enumerate(config.kv_directories) if place is not None]
        self._of_rank = len(TIERS)
        # Of a mask, the bits of all ranks in the first tier.
        self._all_ranks = sum(1 << self._of_rank * rank for rank in range(self._num_ranks))
        self._candidates: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._order_id = 0
        self._tickets: dict[int, _Ticket] = {}  # seq_id |-> ticket
        self.num_read_blocks = self.num_written_blocks = self.num_read_bytes = self.num_hit_tokens = 0
        self.num_corrupt_blocks = self.num_failed_reads = self.num_late_reads = 0
        self.read_blocks_per_s = 0.0
        self._rate_blocks = 0  # that the rate was measured with, at most _RATE_BLOCKS
        self.tier_bytes = [0] * len(TIERS)
        self._read_at = -RETRY_S
        self._polled_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self._masks: dict[bytes, int] = {}  # key |-> bit `rank * num_tiers + tier` for each place
        self._counts = [0] * len(TIERS)  # blocks that all ranks have in a tier
        self._orders: dict[int, _Order] = {}
        self._queued: list[StoredOrder] = []  # for the next plan
        self._order_of: dict[bytes, int] = {}  # key |-> read under way
        self._whole: set[tuple[int, int]] = set()
        self._asked_at: float | None = None  # since when the ranks' first reports are awaited

    # What there is

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether every rank has its part of a block."""
        mask = self._masks.get(block_key(group, digest), 0)
        return (mask | mask >> 1) & self._all_ranks == self._all_ranks

    @property
    def num_blocks_in(self) -> tuple[int, ...]:
        """Return the blocks that all ranks have, in each tier."""
        return tuple(self._counts)

    @property
    def is_empty(self) -> bool:
        return not self._masks

    @property
    def _room(self) -> int:
        """Return the host blocks that orders may still take: half of them belong to the host tier itself."""
        used = sum(len(each.order.host_blocks) for each in self._orders.values())
        used += sum(len(each.held) for each in self._tickets.values())
        return min(self._host.num_blocks // 2 - used, self._host.num_free)

    # Reads

    def max_read_blocks(self, num_tokens: int, tokens_per_s: float, now: float) -> int:
        """Return how many blocks may be read instead of computing `num_tokens`; 0 if computing is faster.

        Args:
            tokens_per_s: measured rate of prompts; 0 if it is not known.
        """
        room = self._room
        if not self.read_blocks_per_s or not tokens_per_s or now - self._read_at > RETRY_S:
            return room
        blocks = num_tokens / self._block_size
        reading_s = READ_OVERHEAD_S + blocks / self.read_blocks_per_s
        return room if reading_s < num_tokens / tokens_per_s else 0

    def begin_read(
        self, sequence: Sequence, contents: Items[tuple[int, CacheKey]], compute_s: float, now: float
    ) -> None:
        """Order the blocks that no other sequence waits for already, and give the sequence a ticket.

        Args:
            contents: cache group and content of each block; at most as many as `max_read_blocks`.
            compute_s: expected time to compute the tokens; 0 if it is not known.
        """
        ticket = _Ticket(sequence, set(), now + max(MIN_WAIT_S, min(MAX_WAIT_S, compute_s or FIRST_WAIT_S)))
        fresh = list[tuple[int, CacheKey]]()
        for group, key in contents:
            under_way = self._order_of.get(block_key(group, key[0]))
            if under_way is None:
                fresh.append((group, key))
            else:
                ticket.orders.add(under_way)
        host_blocks = self._host.reserve(len(fresh)) if fresh else []
        if fresh and host_blocks:
            keys = [block_key(group, key[0]) for group, key in fresh]
            order_id = self._add_order(True, keys, host_blocks, fresh, now)
            self._order_of.update(dict.fromkeys(keys, order_id))
            ticket.orders.add(order_id)
            self._read_at = now
        if ticket.orders:
            self._tickets[sequence.seq_id] = ticket

    def must_wait(self, sequence: Sequence, now: float) -> bool:
        """Return whether a sequence's blocks are still being read, and it is not too late for them."""
        ticket = self._tickets.get(sequence.seq_id)
        return ticket is not None and self._is_waiting(ticket, now)

    def _is_waiting(self, ticket: _Ticket, now: float) -> bool:
        if ticket.orders and now >= ticket.deadline:
            ticket.orders.clear()
            self.num_late_reads += 1
        return bool(ticket.orders)

    def park(self, sequence: Sequence) -> None:
        """Keep a sequence that must wait until `unpark` returns it."""
        self._tickets[sequence.seq_id].is_parked = True

    def unpark(self, now: float) -> list[Sequence]:
        """Return the parked sequences that need not wait any more."""
        if not self._tickets:  # as in most steps
            return []
        over = [each for each in self._tickets.values() if each.is_parked and not self._is_waiting(each, now)]
        for ticket in over:
            ticket.is_parked = False
        return [ticket.sequence for ticket in over]

    def on_start(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Release what was read for a sequence that has begun with so many cached tokens."""
        ticket = self._tickets.get(sequence.seq_id)
        if ticket is not None:
            self.num_hit_tokens += min(ticket.num_tokens, num_cached_tokens)
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has begun or ended."""
        ticket = self._tickets.pop(sequence.seq_id, None)
        if ticket is not None:
            self._host.release(ticket.held)

    # Writes

    def note(self, group: int, digest: bytes, sequence: Sequence) -> None:
        """Remember a full block that was computed, to write it when the machine is idle.

        An adapter's files may change between two starts, so that its blocks are not stored.
        """
        if sequence.lora is None:
            self._candidates[group, digest] = None
            if len(self._candidates) > MAX_CANDIDATES:
                self._candidates.popitem(last=False)

    def may_write(self, idle_s: float) -> bool:
        """Return whether a write may begin after the ranks have computed nothing for so long."""
        if not self._candidates or idle_s < IDLE_S or not self._is_whole:
            return False
        return not any(not each.order.is_read for each in self._orders.values()) and self._room > 0

    def take_candidates(self) -> Iterable[tuple[int, bytes]]:
        """Yield blocks to be written, the oldest first, as many as a write may have."""
        for _ in range(min(BLOCKS_PER_WRITE, self._room)):
            while self._candidates:
                (group, digest), _ = self._candidates.popitem(last=False)
                if not self.has(group, digest):
                    yield group, digest
                    break

    def begin_write(self, blocks: list[tuple[int, bytes, int]], now: float) -> None:
        """Order blocks, each as (cache group, digest, host block with a reference for the order), to be written."""
        if blocks:
            keys = [block_key(group, digest) for group, digest, _ in blocks]
            self._add_order(False, keys, [host_block for *_, host_block in blocks], [], now)

    # Orders and reports

    def _add_order(
        self,
        is_read: bool,
        keys: list[bytes],
        host_blocks: list[int],
        contents: list[tuple[int, CacheKey]],
        now: float,
    ) -> int:
        self._order_id += 1
        order = StoredOrder(self._order_id, is_read, b"".join(keys), np.array(host_blocks, np.int32))
        self._orders[self._order_id] = _Order(order, contents, set(range(self._num_ranks)), now)
        self._queued.append(order)
        return self._order_id

    def take_orders(self, now: float) -> tuple[StoredOrder, ...]:
        """Return the orders for the next plan."""
        self._polled_at = now
        orders, self._queued = tuple(self._queued), []
        return orders

    @property
    def _is_whole(self) -> bool:
        return len(self._whole) == len(self._tiers) * self._num_ranks

    @property
    def is_settled(self) -> bool:
        """Return whether all blocks are stored that can be, and the ranks have reported what they have."""
        return self._is_whole and not self._candidates and not self._orders

    def wants_step(self, now: float) -> bool:
        """Return whether ranks that have nothing to compute have orders to get or reports to make."""
        if self._queued or any(now - each.begun_at < POLL_S for each in self._orders.values()):
            return True
        if not self._is_whole:
            self._asked_at = now if self._asked_at is None else self._asked_at
            return now - self._asked_at < INDEX_POLL_S
        return "shared" in (TIERS[tier] for tier in self._tiers) and now - self._polled_at >= SHARED_POLL_S

    def on_reports(self, reports: Iterable[StoredReport]) -> None:
        """Learn from the ranks' reports."""
        for report in reports:
            place = 1 << self._of_rank * report.rank + report.tier
            for key in split_keys(report.removed):
                self._set_mask(key, self._masks.get(key, 0) & ~place, report.tier)
            for key in split_keys(report.added):
                self._set_mask(key, self._masks.get(key, 0) | place, report.tier)
            if report.is_whole:
                self._whole.add((report.rank, report.tier))
            if report.tier_bytes:
                self.tier_bytes[report.tier] = report.tier_bytes
            if report.order_id in self._orders:
                self._on_end(self._orders[report.order_id], report)

    def _set_mask(self, key: bytes, mask: int, tier: int) -> None:
        whole = self._all_ranks << tier
        was, now = self._masks.get(key, 0) & whole == whole, mask & whole == whole
        if mask:
            self._masks[key] = mask
        else:
            self._masks.pop(key, None)
        if was == now:
            return
        self._counts[tier] += now - was
        if key[:4] == b"\0\0\0\0":  # as all events: those of the first cache group
            if now:
                self._events.add_stored_below(key[4:], STORED_MEDIA[tier], 0)
            else:
                self._events.add_removed(key[4:], STORED_MEDIA[tier], 0)

    def _on_end(self, order: _Order, report: StoredReport) -> None:
        """Count a rank's end of an order; use or release its host blocks with that of the last rank."""
        order.ranks.discard(report.rank)
        order.failed.update(report.failed.tolist())
        num_blocks = len(order.order.host_blocks)
        num_done = num_blocks - len(report.failed)
        self.num_corrupt_blocks += report.num_corrupt
        if order.order.is_read:
            self.num_read_bytes += report.num_bytes
            if report.seconds > 0 and num_done:
                order.rates.append(num_done / report.seconds)
        if order.ranks:
            return
        del self._orders[report.order_id]
        if order.order.is_read:
            self._on_read(order)
        else:
            self.num_written_blocks += num_blocks - len(order.failed)
        self._host.release(order.order.host_blocks.tolist())

    def _on_read(self, order: _Order) -> None:
        """List the blocks that every rank has read, and hold them for the sequences that wait."""
        read = list[int]()
        for position, ((group, key), host_block) in enumerate(
            zip(order.contents, order.order.host_blocks.tolist(), strict=True)
        ):
            self._order_of.pop(block_key(group, key[0]), None)
            if position not in order.failed:
                self._host.fill(group, key, host_block)
                read.append(host_block)
        self.num_read_blocks += len(read)
        self.num_failed_reads += len(order.failed)
        if order.rates:
            self._measure(len(read), min(order.rates))
        num_tokens = self._block_size * sum(
            group == 0 for position, (group, _) in enumerate(order.contents) if position not in order.failed
        )
        for ticket in self._tickets.values():
            if order.order.order_id in ticket.orders:
                ticket.orders.discard(order.order.order_id)
                ticket.num_tokens += num_tokens
                self._host.hold(read)
                ticket.held += read

    def _measure(self, num_blocks: int, blocks_per_s: float) -> None:
        """Take a read into the measured rate, which is that of all blocks together: seconds are added, not rates."""
        old = self._rate_blocks
        seconds = num_blocks / blocks_per_s + (old / self.read_blocks_per_s if old else 0.0)
        if num_blocks:
            self.read_blocks_per_s = (num_blocks + old) / seconds
            self._rate_blocks = min(num_blocks + old, _RATE_BLOCKS)

    def reset(self) -> None:
        """Forget all orders, and what there is: the ranks start over, and report it again."""
        for order in self._orders.values():
            self._host.release(order.order.host_blocks.tolist())
        for ticket in self._tickets.values():
            self._host.release(ticket.held)
            ticket.held, ticket.orders = [], set()
        for key in list(self._masks):
            for tier in self._tiers:
                self._set_mask(key, self._masks.get(key, 0) & ~(self._all_ranks << tier), tier)
        self._begin()

    @property
    def held_on_host(self) -> list[int]:
        """Return the host blocks of orders and tickets, as often as they are held."""
        orders = [block for each in self._orders.values() for block in each.order.host_blocks.tolist()]
        return orders + [block for each in self._tickets.values() for block in each.held]

    def check_integrity(self, alive: Items[int]) -> None:
        """Check that tickets are of sequences that are alive, and that the blocks of each tier are counted."""
        assert self._tickets.keys() <= set(alive), "a ticket of a sequence that has ended"
        for tier in self._tiers:
            whole = self._all_ranks << tier
            count = sum(mask & whole == whole for mask in self._masks.values())
            assert count == self._counts[tier], (
                f"{TIERS[tier]} has {count} blocks, {self._counts[tier]} counted"
            )
        reads = {order_id for order_id, each in self._orders.items() if each.order.is_read}
        assert set(self._order_of.values()) <= reads, "a block waits for a read that has ended"


class NoStoredTier(StoredTier):
    """A replica that stores no blocks."""

    is_on = False

    def __init__(self) -> None:
        self.num_read_blocks = self.num_written_blocks = self.num_read_bytes = self.num_hit_tokens = 0
        self.num_corrupt_blocks = self.num_failed_reads = self.num_late_reads = 0
        self.read_blocks_per_s = 0.0
        self.tier_bytes = [0] * len(TIERS)

    def has(self, group: int, digest: bytes) -> bool:
        return False

    @property
    def num_blocks_in(self) -> tuple[int, ...]:
        return (0,) * len(TIERS)

    @property
    def is_empty(self) -> bool:
        return True

    def must_wait(self, sequence: Sequence, now: float) -> bool:
        return False

    def unpark(self, now: float) -> list[Sequence]:
        return []

    def on_start(self, sequence: Sequence, num_cached_tokens: int) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def note(self, group: int, digest: bytes, sequence: Sequence) -> None:
        pass

    def may_write(self, idle_s: float) -> bool:
        return False

    def take_orders(self, now: float) -> tuple[StoredOrder, ...]:
        return ()

    @property
    def is_settled(self) -> bool:
        return True

    def wants_step(self, now: float) -> bool:
        return False

    def on_reports(self, reports: Iterable[StoredReport]) -> None:
        pass

    def reset(self) -> None:
        pass

    @property
    def held_on_host(self) -> list[int]:
        return []

    def check_integrity(self, alive: Items[int]) -> None:
        pass
