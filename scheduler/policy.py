"""Policies: who runs next, and who gives way. Pure functions over sequences."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from .sequence import Sequence


def first_come_first_served(sequence: Sequence) -> int:
    """Admission order: by arrival. A preempted sequence keeps its place."""
    return sequence.seq_id


def choose_victim(running: Iterable[Sequence], beneficiary: Sequence) -> Sequence | None:
    """Who gives its blocks to `beneficiary`: the latest arrival after it, or None.

    No sequence ever gives way to a later one, so the oldest always gets on, and each in its turn.
    """
    later = (sequence for sequence in running if sequence.seq_id > beneficiary.seq_id)
    return max(later, key=lambda sequence: sequence.seq_id, default=None)


class WaitingQueue:
    """Sequences without a row, by admission order; O(log n) in the queue's length."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sequence]] = []
        self._num_aborted = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_aborted

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._heap if not sequence.aborted)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (first_come_first_served(sequence), sequence))

    def peek(self) -> Sequence | None:
        """The next to be admitted, which stays in the queue."""
        while self._heap and self._heap[0][1].aborted:
            heapq.heappop(self._heap)
            self._num_aborted -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the sequence that `peek` returned."""
        return heapq.heappop(self._heap)[1]

    def abort(self, sequence: Sequence) -> None:
        """Forgets a waiting sequence; its place in the heap is dropped when it comes up."""
        sequence.aborted = True
        self._num_aborted += 1
