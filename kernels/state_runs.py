"""StateRuns: the sequences of a step, for layers that keep a state of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRuns:
    """The runs of a step: the new tokens of each of S sequences, which follow each other among the T tokens.

    Attributes:
        slots: [S] int32, the place of each sequence's state; distinct.
        starts: [S + 1] int32, the first token of each run; then T.
        is_new: [S] bool, the run begins its sequence, from a state of zeros.
        max_len: tokens of the longest run.
    """

    slots: Tensor
    starts: Tensor
    is_new: Tensor
    max_len: int

    def __iter__(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield the slot, the first token, the end and `is_new` of each run."""
        bounds = self.starts.tolist()
        yield from zip(self.slots.tolist(), bounds, bounds[1:], self.is_new.tolist(), strict=False)
