"""WaitingQueue: sequences without a row, in the order of the policy. Operations take O(log n)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter
from typing import Any, Protocol

from ...sequences.sequence import Sequence
from .backlog import Backlog
from .pace import Pace
from .policy import ADMISSION_KEYS, AdmissionKey, by_rank, counter_on_arrival, service

# Sequences near the front of the queue that the longest-prefix policy compares: one prefix lookup for each.
LONGEST_PREFIX_WINDOW = 64
# Removed entries that a heap keeps, beside as many as are present.
MAX_MARKED = 64
# Virtual counters kept for tenants without waiting sequences: bounds the memory for names, which callers choose.
MAX_IDLE_TENANTS = 4096


class _Heap:
    """Sequences by a fixed key. Removed entries stay in the heap until they reach its top or are too many."""

    def __init__(self, key: AdmissionKey) -> None:
        self._key = key
        self._entries: list[tuple[Any, int, Sequence]] = []
        self._present: dict[int, Sequence] = {}  # seq_id |-> sequence, in the order of `push`

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._present

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._entries, (self._key(sequence), sequence.seq_id, sequence))
        self._present[sequence.seq_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        del self._present[sequence.seq_id]
        # Bounds the heap: removed entries behind others might never reach the top.
        if len(self._entries) > 2 * len(self._present) + MAX_MARKED:
            self._entries = [entry for entry in self._entries if entry[1] in self._present]
            heapq.heapify(self._entries)

    def peek(self, passed: Collection[int] = ()) -> Sequence | None:
        """Return the first sequence, except those whose seq_ids are in `passed`: each takes O(log n)."""
        aside = []
        while self._entries and (self._entries[0][1] not in self._present or self._entries[0][1] in passed):
            entry = heapq.heappop(self._entries)
            if entry[1] in self._present:
                aside.append(entry)
        first = self._entries[0][2] if self._entries else None
        for entry in aside:
            heapq.heappush(self._entries, entry)
        return first

    def newest(self) -> Sequence:
        """Return the sequence that was pushed last."""
        return next(reversed(self._present.values()))

    def charge(self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count nothing: the order does not depend on computed tokens."""

    def first_of(self, arrival: int, passed: Collection[int]) -> Sequence | None:
        """Return a sequence of one request that is not in `passed`, or None. Takes O(n)."""
        own = (
            sequence
            for sequence in self._present.values()
            if sequence.arrival == arrival and sequence.seq_id not in passed
        )
        return min(own, key=self._key, default=None)

    def near_front(self, count: int) -> list[Sequence]:
        """Return up to `count` sequences: the first, and others near the front in no particular order."""
        self.peek()
        present = (entry[2] for entry in self._entries if entry[1] in self._present)
        return list(itertools.islice(present, count))


class _Order(Protocol):
    def push(self, sequence: Sequence) -> None: ...
    def remove(self, sequence: Sequence) -> None: ...
    def peek(self, passed: Collection[int] = ()) -> Sequence | None: ...
    def __len__(self) -> int: ...


class _SharerQueue(_Order, Protocol):
    def newest(self) -> Sequence: ...
    def charge(self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None: ...


def _adapter_of(sequence: Sequence) -> str:
    return "" if sequence.lora is None else sequence.lora.name


class _FairOrder:
    """The tenant with the least virtual token counter first; within a tenant, the adapter with the least one.

    Virtual token counters are those of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024).

    Args:
        name_of: returns the sharer that a sequence belongs to.
        make_queue: returns an order of the sequences of one sharer.
    """

    def __init__(
        self,
        weights: dict[str, float],
        name_of: Callable[[Sequence], str],
        make_queue: Callable[[], _SharerQueue],
    ) -> None:
        self._weights = weights
        self._name_of, self._make_queue = name_of, make_queue
        self._queues: dict[str, _SharerQueue] = {}  # tenant |-> its waiting sequences; no empty queues
        self._emptied: dict[
            str, _SharerQueue
        ] = {}  # of tenants without waiting sequences, for their counters
        self._counters: dict[str, float] = {}
        # (counter, tenant) of waiting tenants. Counters only grow, so an outdated entry reaches the top early.
        self._ranking: list[tuple[float, str]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        tenant = self._name_of(sequence)
        if tenant not in self._queues:
            self._counters[tenant] = self.counter_of(tenant)
            emptied = self._emptied.pop(tenant, None)
            self._queues[tenant] = self._make_queue() if emptied is None else emptied
            heapq.heappush(self._ranking, (self._counters[tenant], tenant))
            self._drop_idle()
        self._queues[tenant].push(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = self._name_of(sequence)
        queue = self._queues[tenant]
        queue.remove(sequence)
        self._num_waiting -= 1
        if not queue:
            self._emptied[tenant] = self._queues.pop(tenant)

    def newest(self) -> Sequence:
        """Return the newest sequence of the sharer with the most waiting ones."""
        return max(self._queues.values(), key=len).newest()

    def newest_of(self, tenant: str) -> Sequence | None:
        queue = self._queues.get(tenant)
        return None if queue is None else queue.newest()

    def peek(self, passed: Collection[int] = ()) -> Sequence | None:
        """Return the first sequence that is not in `passed`, of the least served tenant that has one."""
        first, aside = None, []
        while first is None and (tenant := self._least_served()) is not None:
            first = self._queues[tenant].peek(passed)
            if first is None:
                aside.append(heapq.heappop(self._ranking))
        for entry in aside:
            heapq.heappush(self._ranking, entry)
        return first

    def counter_of(self, tenant: str) -> float:
        if tenant in self._queues:
            return self._counters[tenant]
        least = self._least_served()
        active = [] if least is None else [self._counters[least]]
        return counter_on_arrival(self._counters.get(tenant, 0.0), active)

    def weight_of(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def charge(self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count computed tokens of a sequence."""
        tenant = self._name_of(sequence)
        if tenant not in self._counters:
            return
        queue = self._queues.get(tenant, self._emptied.get(tenant))
        if queue is not None:
            queue.charge(sequence, num_prompt_tokens, num_output_tokens)
        self._counters[tenant] += service(num_prompt_tokens, num_output_tokens, self.weight_of(tenant))
        if tenant in self._queues:
            heapq.heappush(self._ranking, (self._counters[tenant], tenant))

    def _least_served(self) -> str | None:
        while self._ranking:
            counter, tenant = self._ranking[0]
            if tenant in self._queues and counter == self._counters[tenant]:
                return tenant
            heapq.heappop(self._ranking)
        return None

    def _drop_idle(self) -> None:
        if len(self._counters) - len(self._queues) > MAX_IDLE_TENANTS:
            self._counters = {tenant: self._counters[tenant] for tenant in self._queues}
            self._emptied.clear()


def _fair_order(weights: dict[str, float]) -> _FairOrder:
    """Return the order by tenants; of one tenant, by adapters; of one adapter, by arrival."""

    def order_adapters() -> _FairOrder:
        return _FairOrder({}, _adapter_of, lambda: _Heap(ADMISSION_KEYS["fcfs"]))

    return _FairOrder(weights, attrgetter("tenant"), order_adapters)


class _LongestPrefixOrder:
    """Of the sequences near the front, the one with the most cached tokens first (Zheng et al., SGLang, 2024)."""

    def __init__(self, num_cached_tokens: Callable[[Sequence], int]) -> None:
        self._num_cached_tokens = num_cached_tokens
        self._queue = _Heap(ADMISSION_KEYS["fcfs"])

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, sequence: Sequence) -> None:
        self._queue.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)

    def peek(self, passed: Collection[int] = ()) -> Sequence | None:
        oldest = self._queue.peek(passed)
        if oldest is None or oldest.times_overtaken >= LONGEST_PREFIX_WINDOW:
            return oldest  # bounds its wait
        window = [
            sequence
            for sequence in self._queue.near_front(LONGEST_PREFIX_WINDOW)
            if sequence.seq_id not in passed
        ]
        best = max(window, key=lambda sequence: (self._num_cached_tokens(sequence), -sequence.arrival))
        if best is not oldest:
            oldest.times_overtaken += 1
        return best


class WaitingQueue:
    """Sequences that wait for a row.

    Sequences that ran before (preempted, or forked from a running one), or keep their turn while an image is
    encoded for them, come first, by priority and arrival, under each policy. Only a sequence of higher priority goes
    before them, if the policy is ``priority``.

    Args:
        policy: ``fcfs``, ``priority``, ``fair``, ``shortest-prefill`` or ``longest-prefix``.
        num_cached_tokens: returns the length of a sequence's cached prefix, for the longest-prefix policy.
        tenant_weights: (tenant, share) for the fair policy; other tenants have the share 1.
        pace: predicts the lengths of outputs.

    Attributes:
        backlog: expected work of the waiting sequences.
    """

    def __init__(
        self,
        policy: str,
        num_cached_tokens: Callable[[Sequence], int],
        tenant_weights: Iterable[tuple[str, float]] = (),
        pace: Pace | None = None,
    ) -> None:
        self._fair = _fair_order(dict(tenant_weights)) if policy == "fair" else None
        self._new: _Order
        if self._fair is not None:
            self._new = self._fair
        elif policy == "longest-prefix":
            self._new = _LongestPrefixOrder(num_cached_tokens)
        else:
            self._new = _Heap(ADMISSION_KEYS[policy])
        self._by_priority = policy == "priority"
        self._resumed = _Heap(by_rank)
        self._parked: dict[int, Sequence] = {}  # seq_id |-> sequence that cannot start yet
        self.backlog = Backlog(policy, pace or Pace(), self._fair)

    def __len__(self) -> int:
        return len(self._new) + len(self._resumed) + len(self._parked)

    def push(self, sequence: Sequence) -> None:
        (self._resumed if sequence.has_run else self._new).push(sequence)
        self.backlog.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        if self._parked.pop(sequence.seq_id, None) is None:
            self._order_of(sequence).remove(sequence)
        self.backlog.remove(sequence)

    def park(self, sequence: Sequence) -> None:
        """Let others pass a waiting sequence, which cannot start yet; it still counts as waiting."""
        self._order_of(sequence).remove(sequence)
        self._parked[sequence.seq_id] = sequence

    def unpark(self, sequence: Sequence) -> None:
        """Give a parked sequence its place again."""
        (self._resumed if sequence.has_run else self._new).push(self._parked.pop(sequence.seq_id))

    def keep_turn(self, sequence: Sequence) -> None:
        """Let a sequence wait with those that ran before: later ones go past it, and may be preempted.

        These would come before it otherwise, each time that they are.
        """
        if sequence not in self._resumed:
            self._new.remove(sequence)
            self._resumed.push(sequence)

    def _order_of(self, sequence: Sequence) -> _Order:
        return self._resumed if sequence in self._resumed else self._new

    def peek(self, passed: Collection[int] = ()) -> Sequence | None:
        """Return the sequence to admit next, which stays in the queue, or None.

        Args:
            passed: seq_ids of sequences that others may go before in this step.
        """
        resumed, new = self._resumed.peek(passed), self._new.peek(passed)
        if resumed is None or (self._by_priority and new is not None and new.rank < resumed.rank):
            return new
        return resumed

    def crowding_sequence(self, tenant: str) -> Sequence | None:
        """Return the newest sequence of the tenant with the most waiting work, if it crowds out another tenant.

        Returns None under other policies than ``fair``, and if that tenant or nobody waits.
        """
        if self._fair is None or self.backlog.has_fair_share(tenant):
            return None
        tenant = self.backlog.largest_tenant()
        parked = (sequence for sequence in reversed(self._parked.values()) if sequence.tenant == tenant)
        return self._fair.newest_of(tenant) or next(parked, None)

    def first_of(self, arrival: int, passed: Collection[int]) -> Sequence | None:
        """Return a waiting sequence of one request, which ran before, or None; see `peek`."""
        return self._resumed.first_of(arrival, passed)

    def charge(self, sequence: Sequence, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Charge a sequence's computed tokens to its tenant and its adapter, under the fair policy."""
        if self._fair is not None:
            self._fair.charge(sequence, num_prompt_tokens, num_output_tokens)

    def charge_outputs(self, sequences: list[Sequence], nums_tokens: list[int]) -> None:
        """Charge so many sampled tokens of each sequence as `charge` does, the sequences of an adapter at once."""
        if self._fair is None:
            return
        sharers = list(map(attrgetter("tenant", "lora"), sequences))
        num_tokens_of = dict.fromkeys(sharers, 0)
        for sharer, num_tokens in zip(sharers, nums_tokens, strict=True):
            num_tokens_of[sharer] += num_tokens
        any_of = dict(zip(sharers, sequences, strict=True))
        for sharer, num_tokens in num_tokens_of.items():
            self._fair.charge(any_of[sharer], 0, num_tokens)
