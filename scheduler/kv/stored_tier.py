"""StoredTier: blocks that the ranks keep in files, which outlive the process. Pure: no clock, no files.

The scheduler decides what is written and read; the ranks report what they have. A block is present if every rank has
its part of it, in any tier. What is read goes into host blocks, and is found by the next lookup as what was evicted
to them; what is written comes from host blocks. So the swaps of the host tier are the only way into the device.
Snapshots of states pass through slots in host memory in the same way.

A sequence whose prefix goes on in files waits for a read that was ordered for it, until its *ticket* is over: all
blocks were read, some failed, or the time is over in which its tokens would have been computed. Then it starts with
what there is. Host blocks of an order stay held until all ranks have reported it, however late.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from ...proto.config import EngineConfig
from ...proto.stored_kv import STATE_GROUP, TIERS, StoredOrder, StoredReport, block_key, is_state, split_keys
from ..sequences.sequence import Sequence
from .cache_events import STORED_MEDIA, CacheEvents, CacheKey
from .host_tier import HostTier
from .state_slots import StateSlots

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


# Whether it is the slot of a state or a block, and its number in host memory.
_Place = tuple[bool, int]


@dataclass(slots=True, eq=False)
class _Order:
    """An order that not all ranks have reported.

    Attributes:
        contents: cache group and content of each block that is read; empty for a write.
        places: in host memory, of the blocks and states, held until all ranks have reported.
        num_tokens: that a read is to save.
        ranks: that have not reported it.
        rates: blocks/s of the ranks that have.
    """

    order: StoredOrder
    contents: list[tuple[int, CacheKey]]
    places: list[_Place]
    num_tokens: int
    ranks: set[int]
    begun_at: float
    failed: set[int] = field(default_factory=set)
    rates: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Ticket:
    """A sequence's wait for blocks.

    Attributes:
        orders: that are under way.
        held: what was read for it, one reference each.
        num_tokens: tokens of the blocks that were read.
    """

    sequence: Sequence
    orders: set[int]
    deadline: float
    held: list[_Place] = field(default_factory=list)
    num_tokens: int = 0
    is_parked: bool = False


class StoredTier:
    """The files of all ranks, as far as they have reported them.

    Args:
        host, states: host memory of the blocks and of the states that are read and written.
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

    def __init__(self, config: EngineConfig, host: HostTier, states: StateSlots, events: CacheEvents) -> None:
        self._host, self._states, self._events = host, states, events
        # A read of a state takes the time of so many blocks, as a move between host and device does.
        cache = config.cache
        has_rates = cache.swap_blocks_per_s > 0 and 0 < cache.swap_states_per_s < math.inf
        self._blocks_per_state = cache.swap_blocks_per_s / cache.swap_states_per_s if has_rates else 1.0
        self._block_size = config.cache.block_size
        self._num_ranks = config.parallel.num_ranks
        self._tiers = [number for number, place in enumerate(config.kv_directories) if place is not None]
        self._of_rank = len(TIERS)
        # Of a mask, the bits of all ranks in the first tier.
        self._all_ranks = sum(1 << self._of_rank * rank for rank in range(self._num_ranks))
        # Of blocks, and of states: (group, digest) of what is to be written.
        self._candidates = OrderedDict[tuple[int, bytes], None](), OrderedDict[tuple[int, bytes], None]()
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
        """Return whether every rank has its part of a block, or of a state."""
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
    def num_readable_blocks(self) -> int:
        """Return how many blocks a read may have now."""
        return max(0, self._room(is_state=False))

    def _room(self, *, is_state: bool) -> int:
        """Return the host blocks or slots that orders may still take: half of them belong to others."""
        num_places, num_free = self._states.room if is_state else self._host.room
        held = (
            *(each.places for each in self._orders.values()),
            *(each.held for each in self._tickets.values()),
        )
        used = sum(kind == is_state for places in held for kind, _ in places)
        return min(-(-num_places // 2) - used, num_free)

    def _hold(self, places: list[_Place]) -> None:
        self._host.hold([place for is_state, place in places if not is_state])
        self._states.hold([place for is_state, place in places if is_state])

    def _release(self, places: list[_Place]) -> None:
        self._host.release([place for is_state, place in places if not is_state])
        self._states.release([place for is_state, place in places if is_state])

    # Reads

    def may_read(self, groups: Items[int], num_tokens: int, tokens_per_s: float, now: float) -> bool:
        """Return whether blocks and states may be read instead of computing `num_tokens`.

        Args:
            groups: of each block, or that of states.
            tokens_per_s: measured rate of prompts; 0 if it is not known.
        """
        num_states = groups.count(STATE_GROUP)
        num_blocks = len(groups) - num_states
        if num_blocks > self._room(is_state=False) or num_states > self._room(is_state=True):
            return False
        if not self.read_blocks_per_s or not tokens_per_s or now - self._read_at > RETRY_S:
            return True
        weight = num_tokens / self._block_size + num_states * self._blocks_per_state
        return READ_OVERHEAD_S + weight / self.read_blocks_per_s < num_tokens / tokens_per_s

    def begin_read(
        self,
        sequence: Sequence,
        contents: Items[tuple[int, CacheKey]],
        num_tokens: int,
        compute_s: float,
        now: float,
    ) -> None:
        """Order the blocks that no other sequence waits for already, and give the sequence a ticket.

        Args:
            contents: cache group and content of each block or state, as many as `may_read` allows.
            num_tokens: that the sequence can start with only after the read.
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
        places = self._reserve([group for group, _ in fresh])
        if places:
            keys = [block_key(group, key[0]) for group, key in fresh]
            order_id = self._add_order(True, keys, places, fresh, num_tokens, now)
            self._order_of.update(dict.fromkeys(keys, order_id))
            ticket.orders.add(order_id)
            self._read_at = now
        if ticket.orders:
            self._tickets[sequence.seq_id] = ticket

    def _reserve(self, groups: list[int]) -> list[_Place]:
        """Return a place in host memory for each block or state; none if there are too few."""
        num_states = groups.count(STATE_GROUP)
        blocks = self._host.reserve(len(groups) - num_states)
        slots = None if blocks is None else self._states.reserve(num_states)
        if blocks is None or slots is None:
            self._host.release(blocks or [])
            return []
        of_kind = {False: iter(blocks), True: iter(slots)}
        return [(group == STATE_GROUP, next(of_kind[group == STATE_GROUP])) for group in groups]

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
            self._release(ticket.held)

    # Writes

    def note(self, group: int, digest: bytes, sequence: Sequence) -> None:
        """Remember a full block that was computed, or a snapshot, to write it when the machine is idle.

        The blocks of an adapter are stored if its content names them: its files may change between two starts.
        """
        if sequence.lora is None or sequence.lora.content:
            candidates = self._candidates[group == STATE_GROUP]
            candidates[group, digest] = None
            if len(candidates) > MAX_CANDIDATES:
                candidates.popitem(last=False)

    def may_write(self, idle_s: float) -> bool:
        """Return whether a write may begin after the ranks have computed nothing for so long."""
        if idle_s < IDLE_S or not self._is_whole:
            return False
        if any(not each.order.is_read for each in self._orders.values()):
            return False
        return any(
            candidates and self._room(is_state=bool(kind)) > 0
            for kind, candidates in enumerate(self._candidates)
        )

    def take_candidates(self) -> Iterable[tuple[int, bytes]]:
        """Yield blocks and states to be written, the oldest first, as many as a write may have."""
        for kind, candidates in enumerate(self._candidates):
            for _ in range(min(BLOCKS_PER_WRITE, self._room(is_state=bool(kind)))):
                while candidates:
                    (group, digest), _ = candidates.popitem(last=False)
                    if not self.has(group, digest):
                        yield group, digest
                        break

    def begin_write(self, blocks: list[tuple[int, bytes, int]], now: float) -> None:
        """Order blocks and states to be written.

        Args:
            blocks: each as (cache group, digest, host block or slot with a reference for the order).
        """
        if blocks:
            keys = [block_key(group, digest) for group, digest, _ in blocks]
            places = [(group == STATE_GROUP, place) for group, _, place in blocks]
            self._add_order(False, keys, places, [], 0, now)

    # Orders and reports

    def _add_order(
        self,
        is_read: bool,
        keys: list[bytes],
        places: list[_Place],
        contents: list[tuple[int, CacheKey]],
        num_tokens: int,
        now: float,
    ) -> int:
        self._order_id += 1
        numbers = np.array([place for _, place in places], np.int32)
        order = StoredOrder(self._order_id, is_read, b"".join(keys), numbers)
        ranks = set(range(self._num_ranks))
        self._orders[self._order_id] = _Order(order, contents, places, num_tokens, ranks, now)
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
        return self._is_whole and not any(self._candidates) and not self._orders

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
        if was == now or is_state(key):
            return
        self._counts[tier] += now - was
        if key[:4] == b"\0\0\0\0":  # as all events: those of the first cache group
            if now:
                self._events.add_stored_below(key[4:], STORED_MEDIA[tier], 0)
            else:
                self._events.add_removed(key[4:], STORED_MEDIA[tier], 0)

    def _on_end(self, order: _Order, report: StoredReport) -> None:
        """Count a rank's end of an order; use or release its places with that of the last rank."""
        order.ranks.discard(report.rank)
        order.failed.update(report.failed.tolist())
        self.num_corrupt_blocks += report.num_corrupt
        if order.order.is_read:
            self.num_read_bytes += report.num_bytes
            weight = self._weight(order, set(report.failed.tolist()))
            if report.seconds > 0 and weight:
                order.rates.append(weight / report.seconds)
        if order.ranks:
            return
        del self._orders[report.order_id]
        if order.order.is_read:
            self._on_read(order)
        else:
            self.num_written_blocks += len(order.places) - len(order.failed)
        self._release(order.places)

    def _weight(self, order: _Order, failed: set[int]) -> float:
        """Return how many blocks have the bytes of what an order has read."""
        read = [is_state for position, (is_state, _) in enumerate(order.places) if position not in failed]
        return len(read) + sum(read) * (self._blocks_per_state - 1)

    def _on_read(self, order: _Order) -> None:
        """List the blocks that every rank has read, and hold them for the sequences that wait."""
        read = list[_Place]()
        for position, ((group, key), place) in enumerate(zip(order.contents, order.places, strict=True)):
            self._order_of.pop(block_key(group, key[0]), None)
            if position in order.failed:
                continue
            if group == STATE_GROUP:
                self._states.fill(key[0], place[1], order.num_tokens)
            else:
                self._host.fill(group, key, place[1])
            read.append(place)
        self.num_read_blocks += len(read)
        self.num_failed_reads += len(order.failed)
        if order.rates:
            self._measure(self._weight(order, order.failed), min(order.rates))
        num_tokens = self._block_size * sum(
            group == 0 for position, (group, _) in enumerate(order.contents) if position not in order.failed
        )
        for ticket in self._tickets.values():
            if order.order.order_id in ticket.orders:
                ticket.orders.discard(order.order.order_id)
                ticket.num_tokens += num_tokens
                self._hold(read)
                ticket.held += read

    def _measure(self, num_blocks: float, blocks_per_s: float) -> None:
        """Take a read into the measured rate, which is that of all blocks together: seconds are added, not rates."""
        old = self._rate_blocks
        seconds = num_blocks / blocks_per_s + (old / self.read_blocks_per_s if old else 0.0)
        if num_blocks:
            self.read_blocks_per_s = (num_blocks + old) / seconds
            self._rate_blocks = min(round(num_blocks + old), _RATE_BLOCKS)

    def reset(self) -> None:
        """Forget all orders, and what there is: the ranks start over, and report it again."""
        for order in self._orders.values():
            self._release(order.places)
        for ticket in self._tickets.values():
            self._release(ticket.held)
            ticket.held, ticket.orders = [], set()
        for key in list(self._masks):
            for tier in self._tiers:
                self._set_mask(key, self._masks.get(key, 0) & ~(self._all_ranks << tier), tier)
        self._begin()

    @property
    def held_on_host(self) -> list[int]:
        """Return the host blocks of orders and tickets, as often as they are held."""
        return [place for is_state, place in self._held_places() if not is_state]

    @property
    def held_states(self) -> list[int]:
        """Return the slots in host memory of orders and tickets, as often as they are held."""
        return [place for is_state, place in self._held_places() if is_state]

    def _held_places(self) -> Iterator[_Place]:
        for order in self._orders.values():
            yield from order.places
        for ticket in self._tickets.values():
            yield from ticket.held

    def check_integrity(self, alive: Items[int]) -> None:
        """Check that tickets are of sequences that are alive, and that the blocks of each tier are counted."""
        assert self._tickets.keys() <= set(alive), "a ticket of a sequence that has ended"
        for tier in self._tiers:
            whole = self._all_ranks << tier
            count = sum(mask & whole == whole and not is_state(key) for key, mask in self._masks.items())
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

    @property
    def held_states(self) -> list[int]:
        return []

    def check_integrity(self, alive: Items[int]) -> None:
        pass
