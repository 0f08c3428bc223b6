"""ReplaceableGroup: a communicator whose group is joined anew after a rank was replaced."""

from __future__ import annotations

from torch import Tensor

from .communicator import Communicator


class ReplaceableGroup:
    """Communicator that passes each collective to the present group. The model keeps its reference to it.

    Attributes:
        group: the present group.
    """

    def __init__(self, group: Communicator) -> None:
        self.rank, self.size = group.rank, group.size
        self.group = group

    def replace(self, group: Communicator) -> None:
        """Leave the present group; use `group`, in which this rank has the same number."""
        assert (group.rank, group.size) == (self.rank, self.size), "the group has other ranks"
        self.group.close()
        self.group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.group.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.group.all_gather(tensor)

    def barrier(self) -> None:
        self.group.barrier()

    def close(self) -> None:
        self.group.close()
