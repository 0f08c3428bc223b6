"""WaitingQueue: sequences without a row, in the order of the policy. O(log n) an operation in their number."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..sequences.sequence import Sequence
from .policy import ADMISSION_KEYS, AdmissionKey, by_priority, counter_on_arrival, service

# The longest-prefix policy compares this many sequences near the front of the queue: a look-up for each, each time.
LONGEST_PREFIX_WINDOW = 64
# Removed entries that a heap keeps, beside as many as are present.
MAX_MARKED = 64
# Virtual counters kept of tenants that wait for nothing; names come from callers, and must not pile up.
MAX_IDLE_TENANTS = 4096


class _Heap:
    """Sequences by a fixed key. Removal is a mark; marked ones are dropped when they come up."""

    def __init__(self, key: AdmissionKey) -> None:
        self._key = key
        self._entries: list[tuple[Any, int, Sequence]] = []
        self._present: set[int] = set()

    def __len__(self) -> int:
        return len(self._present)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._entries, (self._key(sequence), sequence.seq_id, sequence))
        self._present.add(sequence.seq_id)

    def remove(self, sequence: Sequence) -> None:
        self._present.discard(sequence.seq_id)
        # Aborted ones that never come up, since others always go before them, must not pile up.
        if len(self._entries) > 2 * len(self._present) + MAX_MARKED:
            self._entries = [entry for entry in self._entries if entry[1] in self._present]
            heapq.heapify(self._entries)

    def peek(self) -> Sequence | None:
        while self._entries and self._entries[0][1] not in self._present:
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def near_front(self, count: int) -> list[Sequence]:
        """Up to `count`, the first among them; a heap says no more of the others than that they are early."""
        self.peek()
        present = (entry[2] for entry in self._entries if entry[1] in self._present)
        return list(itertools.islice(present, count))


class _Order(Protocol):
    def push(self, sequence: Sequence) -> None: ...
    def remove(self, sequence: Sequence) -> None: ...
    def peek(self) -> Sequence | None: ...
    def __len__(self) -> int: ...


class _FairOrder:
    """Per tenant by arrival; between tenants the one whose virtual token counter is least.

    The virtual token counter of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024).
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._queues: dict[str, _Heap] = {}  # of tenants that wait
        self._counters: dict[str, float] = {}
        # (counter, tenant) of those that wait. Counters only grow, so an entry that is out of date comes up early.
        self._ranking: list[tuple[float, str]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        if tenant not in self._queues:
            least = self._least_served()
            active = [] if least is None else [self._counters[least]]
            self._counters[tenant] = counter_on_arrival(self._counters.get(tenant, 0.0), active)
            self._queues[tenant] = _Heap(ADMISSION_KEYS["fcfs"])
            heapq.heappush(self._ranking, (self._counters[tenant], tenant))
            self._forget_idle()
        self._queues[tenant].push(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.tenant]
        queue.remove(sequence)
        self._num_waiting -= 1
        if not queue:
            del self._queues[sequence.tenant]

    def peek(self) -> Sequence | None:
        tenant = self._least_served()
        return None if tenant is None else self._queues[tenant].peek()

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if tenant not in self._counters:
            return
        weight = self._weights.get(tenant, 1.0)
        self._counters[tenant] += service(num_prompt_tokens, num_output_tokens, weight)
        if tenant in self._queues:
            heapq.heappush(self._ranking, (self._counters[tenant], tenant))

    def _least_served(self) -> str | None:
        while self._ranking:
            counter, tenant = self._ranking[0]
            if tenant in self._queues and counter == self._counters[tenant]:
                return tenant
            heapq.heappop(self._ranking)
        return None

    def _forget_idle(self) -> None:
        if len(self._counters) - len(self._queues) > MAX_IDLE_TENANTS:
            self._counters = {tenant: self._counters[tenant] for tenant in self._queues}


class _LongestPrefixOrder:
    """Among a few early ones, the one with the most cached tokens first (Zheng et al., SGLang, 2024)."""

    def __init__(self, num_cached_tokens: Callable[[Sequence], int]) -> None:
        self._num_cached_tokens = num_cached_tokens
        self._queue = _Heap(ADMISSION_KEYS["fcfs"])

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, sequence: Sequence) -> None:
        self._queue.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)

    def peek(self) -> Sequence | None:
        oldest = self._queue.peek()
        if oldest is None or oldest.times_overtaken >= LONGEST_PREFIX_WINDOW:
            return oldest  # nobody is overtaken for ever
        window = self._queue.near_front(LONGEST_PREFIX_WINDOW)
        best = max(window, key=lambda sequence: (self._num_cached_tokens(sequence), -sequence.arrival))
        if best is not oldest:
            oldest.times_overtaken += 1
        return best


class WaitingQueue:
    """All sequences without a row.

    Those that ran before (preempted, or forked from one that runs) come first, by priority and arrival, whatever
    the policy: they keep their place. Only a higher priority goes before them, where the policy is ``priority``.

    Args:
        policy: ``fcfs``, ``priority``, ``fair``, ``shortest-prefill`` or ``longest-prefix``.
        num_cached_tokens: what the longest-prefix policy looks at.
        tenant_weights: shares of the fair policy; 1 where a tenant is not named.
    """

    def __init__(
        self,
        policy: str,
        num_cached_tokens: Callable[[Sequence], int],
        tenant_weights: Iterable[tuple[str, float]] = (),
    ) -> None:
        self._fair = _FairOrder(dict(tenant_weights)) if policy == "fair" else None
        self._new: _Order
        if self._fair is not None:
            self._new = self._fair
        elif policy == "longest-prefix":
            self._new = _LongestPrefixOrder(num_cached_tokens)
        else:
            self._new = _Heap(ADMISSION_KEYS[policy])
        self._by_priority = policy == "priority"
        self._resumed = _Heap(by_priority)

    def __len__(self) -> int:
        return len(self._new) + len(self._resumed)

    def push(self, sequence: Sequence) -> None:
        (self._resumed if sequence.has_run else self._new).push(sequence)

    def remove(self, sequence: Sequence) -> None:
        (self._resumed if sequence.has_run else self._new).remove(sequence)

    def peek(self) -> Sequence | None:
        """The next to be admitted, which stays in the queue."""
        resumed, new = self._resumed.peek(), self._new.peek()
        if resumed is None or (self._by_priority and new is not None and new.priority > resumed.priority):
            return new
        return resumed

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Tells the fair policy of service given."""
        if self._fair is not None:
            self._fair.charge(tenant, num_prompt_tokens, num_output_tokens)
