"""StateRuns: the sequences of a step, for layers that keep a state of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRuns:
    """The runs of a step: the new tokens of each of S sequences, which follow each other among the T tokens.

    A run with drafted tokens leaves the state as it was before: which of them count is known only after sampling.
    Then the recurrences, whose inputs `calls` keeps, compute the accepted tokens again (`repeat`).

    Attributes:
        slots: [S] int32, the place of each sequence's state; distinct.
        starts: [S + 1] int32, the first token of each run; then T.
        is_new: [S] bool, the run begins its sequence, from a state of zeros.
        max_len: tokens of the longest run.
        stores: [S] bool, the state after the run takes the place of that before it; None if all do.
        shorter: [S] int32, the end of each run that ends before the next one begins; None if all do not.
        calls: the recurrences of a step with drafts, in order; None for other steps.
    """

    slots: Tensor
    starts: Tensor
    is_new: Tensor
    max_len: int
    stores: Tensor | None = None
    shorter: Tensor | None = None
    calls: list[Callable[[StateRuns], Tensor]] | None = None

    @property
    def ends(self) -> Tensor:
        """Return the end of each run, [S] int32."""
        return self.starts[1:] if self.shorter is None else self.shorter

    def __iter__(self) -> Iterator[tuple[int, int, int, bool, bool]]:
        """Yield the slot, the first token, the end, `is_new` and `stores` of each run."""
        stores = [True] * len(self.slots) if self.stores is None else self.stores.tolist()
        columns = self.slots, self.starts, self.ends, self.is_new
        yield from zip(*(each.tolist() for each in columns), stores, strict=False)

    def compute(self, op: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return ``op(*args, runs=self, **kwargs)``, a recurrence; keep the call if it may have to be repeated."""
        if self.calls is not None:
            self.calls.append(lambda runs: op(*args, runs=runs, **kwargs))
        return op(*args, runs=self, **kwargs)

    def repeat(self, index: Tensor, lens: Tensor) -> None:
        """Compute the first tokens of some runs again, and store the states after them.

        Args:
            index: [n] int64, the runs.
            lens: [n] int32, the accepted tokens of each.
        """
        assert self.calls is not None, "the step has no drafts"
        starts, is_new = self.starts[index], self.is_new[index]
        accepted = replace(
            self, slots=self.slots[index], starts=starts, is_new=is_new, stores=torch.ones_like(is_new),
            shorter=starts + lens, calls=None,
        )  # fmt: skip
        for call in self.calls:
            call(accepted)
