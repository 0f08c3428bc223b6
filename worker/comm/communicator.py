"""Communicator: the collectives of one tensor-parallel group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

# Rows that each rank (first index) sends to each rank (second index) in an all-to-all.
RowCounts = Sequence[Sequence[int]]

ALL_TO_ALL = "all-to-all"


def nothing() -> None:
    """Do nothing."""


class Arrival(Protocol):
    """The rows of an all-to-all that has begun."""

    def wait(self) -> Tensor:
        """Return the received rows, by sender. Raises ConnectionError; names the operation and the rank."""
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows that have arrived."""

    rows: Tensor

    def wait(self) -> Tensor:
        return self.rows


class Communicator(Protocol):
    """The collectives of one tensor-parallel group. All ranks call the same ones in the same order.

    Attributes:
        rank: index of this rank, from 0.
        size: number of ranks.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, bit-identical on all; `tensor` may hold it or be overwritten."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, ...] by rank. All have the same shape."""
        ...

    def all_to_all(self, rows: Tensor, counts: RowCounts) -> Arrival:
        """Begin to send rows to each rank and to receive rows of each.

        Every rank calls it, and waits for the arrival before its next collective.

        Args:
            rows: [N, ...], those for each rank adjacent, by rank; nobody writes to them before the arrival.
            counts: the same on all ranks.
        """
        ...

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        ...

    def meet(self, timeout_s: float) -> None:
        """Wait for all ranks after work that takes them different times, such as reading weights.

        Other collectives fail on a rank that waits longer than the group's own timeout.

        Raises:
            ConnectionError: a rank did not come in time, or this one has left the group.
        """
        ...

    def close(self, drop_recordings: Callable[[], object] = nothing) -> None:
        """Leave the group. Safe to call twice.

        Args:
            drop_recordings: drops every graph that collectives of the group are recorded in, without which the
                group may not be left; called in any case.
        """
        ...


class SingleRank:
    """Communicator of a group of one rank."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def all_to_all(self, rows: Tensor, counts: RowCounts) -> Arrival:
        return Arrived(rows)

    def barrier(self) -> None:
        pass

    def meet(self, timeout_s: float) -> None:
        pass

    def close(self, drop_recordings: Callable[[], object] = nothing) -> None:
        drop_recordings()


class _TimedArrival:
    """Rows of an all-to-all, the wait for which is timed."""

    def __init__(self, arrival: Arrival, timed: Callable[[str], AbstractContextManager[None]]) -> None:
        self._arrival, self._timed = arrival, timed

    def wait(self) -> Tensor:
        with self._timed(ALL_TO_ALL):
            return self._arrival.wait()


GroupT = TypeVar("GroupT", bound=Communicator)


class ReplaceableGroup(Generic[GroupT]):
    """Communicator that passes each collective to the present group. The model keeps its reference to it.

    Attributes:
        group: the present group.
    """

    def __init__(self, group: GroupT) -> None:
        self.rank, self.size = group.rank, group.size
        self.group = group
        self._seconds: dict[str, float] = {}

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each kind of collective since the last call; on a GPU those to launch them."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        began_at = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[kind] = self._seconds.get(kind, 0.0) + time.perf_counter() - began_at

    def replace(self, group: GroupT) -> None:
        """Leave the present group; use `group`, in which this rank has the same number."""
        assert (group.rank, group.size) == (self.rank, self.size), "the group has other ranks"
        self.group.close()
        self.group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._timed("all-reduce"):
            return self.group.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        with self._timed("all-gather"):
            return self.group.all_gather(tensor)

    def all_to_all(self, rows: Tensor, counts: RowCounts) -> Arrival:
        with self._timed(ALL_TO_ALL):
            return _TimedArrival(self.group.all_to_all(rows, counts), self._timed)

    def barrier(self) -> None:
        self.group.barrier()

    def meet(self, timeout_s: float) -> None:
        self.group.meet(timeout_s)

    def close(self, drop_recordings: Callable[[], object] = nothing) -> None:
        self.group.close(drop_recordings)
