"""Communicator: the collectives of one tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

# Rows that each rank (first index) sends to each rank (second index) in an all-to-all.
RowCounts = Sequence[Sequence[int]]


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


GroupT = TypeVar("GroupT", bound=Communicator)


class ReplaceableGroup(Generic[GroupT]):
    """Communicator that passes each collective to the present group. The model keeps its reference to it.

    Attributes:
        group: the present group.
    """

    def __init__(self, group: GroupT) -> None:
        self.rank, self.size = group.rank, group.size
        self.group = group

    def replace(self, group: GroupT) -> None:
        """Leave the present group; use `group`, in which this rank has the same number."""
        assert (group.rank, group.size) == (self.rank, self.size), "the group has other ranks"
        self.group.close()
        self.group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.group.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.group.all_gather(tensor)

    def all_to_all(self, rows: Tensor, counts: RowCounts) -> Arrival:
        return self.group.all_to_all(rows, counts)

    def barrier(self) -> None:
        self.group.barrier()

    def meet(self, timeout_s: float) -> None:
        self.group.meet(timeout_s)

    def close(self, drop_recordings: Callable[[], object] = nothing) -> None:
        self.group.close(drop_recordings)
