"""Deadlines on the scheduler's clock: a request brings the time that it has left."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from ....proto.stream import Submit
from ...sequences.sequence import Sequence

# Entries of ended sequences that the heap keeps, beside as many as are alive.
_MAX_ENDED = 1024


def deadline_of(submit: Submit, now: float) -> float | None:
    """Return the deadline of a request that comes now. Returns None if it has none."""
    return None if submit.timeout_s is None else now + submit.timeout_s


class DeadlineQueue:
    """Heap of deadlines. Entries of ended sequences are dropped when they expire, or when they are too many.

    Args:
        alive: seq_id |-> sequence, for all that have not ended.
    """

    def __init__(self, alive: Mapping[int, Sequence]) -> None:
        self._alive = alive
        self._entries: list[tuple[float, int]] = []  # (deadline, seq_id)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence, if it has a deadline."""
        if sequence.deadline is not None:
            self._drop_ended()
            heapq.heappush(self._entries, (sequence.deadline, sequence.seq_id))

    def expire(self, now: float) -> list[Sequence]:
        """Remove and return the live sequences whose deadline has passed."""
        expired = []
        while self._entries and self._entries[0][0] <= now:
            _, seq_id = heapq.heappop(self._entries)
            if seq_id in self._alive:
                expired.append(self._alive[seq_id])
        return expired

    def _drop_ended(self) -> None:
        """Bound the heap: most requests end before their deadline."""
        if len(self._entries) > 2 * len(self._alive) + _MAX_ENDED:
            self._entries = [entry for entry in self._entries if entry[1] in self._alive]
            heapq.heapify(self._entries)
