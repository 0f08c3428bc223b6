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
        cuts: where some runs are cut, and the states saved; None if no run is.
    """

    slots: Tensor
    starts: Tensor
    is_new: Tensor
    max_len: int
    stores: Tensor | None = None
    shorter: Tensor | None = None
    calls: list[Callable[[StateRuns], Tensor]] | None = None
    cuts: Cuts | None = None

    @property
    def ends(self) -> Tensor:
        """Return the end of each run, [S] int32."""
        return self.starts[1:] if self.shorter is None else self.shorter

    def __iter__(self) -> Iterator[tuple[int, int, int, bool, bool]]:
        """Yield the slot, the first token, the end, `is_new` and `stores` of each run."""
        stores = [True] * len(self.slots) if self.stores is None else self.stores.tolist()
        columns = self.slots, self.starts, self.ends, self.is_new
        yield from zip(*(each.tolist() for each in columns), stores, strict=False)

    def compute(
        self, op: Callable[..., Tensor], *args: Any, states: Tensor, by_token: bool = True, **kwargs: Any
    ) -> Tensor:
        """Return ``op(*args, states=states, runs=self, **kwargs)``, a recurrence; keep the call for `repeat`.

        Args:
            by_token: the result is one of each token.
        """

        def call(runs: StateRuns) -> Tensor:
            return op(*args, states=states, runs=runs, **kwargs)

        if self.calls is not None:
            self.calls.append(call)
        if self.cuts is None:
            return call(self)
        return self.cuts.compute(call, states) if by_token else self.cuts.compute_whole(call, self, states)

    def cut(self, index: Tensor, lens: Tensor, targets: Tensor, tails: Tensor, max_tail: int) -> StateRuns:
        """Return the same runs with cuts: some states are saved before the ends of their runs.

        Args:
            index: [n] int64, the runs that are cut, ascending and distinct.
            lens: [n] int32, the tokens of each before its cut.
            targets: [n] int64, the slots that receive the states after these.
            tails: [t] int64, the tokens behind the cuts.
            max_tail: most of them in a run.
        """
        ends = self.ends.clone()
        ends[index] = self.starts[index] + lens
        sources = self.slots[index]
        is_new = torch.zeros_like(self.is_new[index])
        behind = replace(
            self, slots=sources, starts=ends[index], is_new=is_new, max_len=max_tail,
            stores=torch.ones_like(is_new), shorter=self.ends[index], calls=None,
        )  # fmt: skip
        before = replace(self, shorter=ends)
        return replace(self, cuts=Cuts(before, behind, sources.long(), targets, tails))

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


@dataclass(frozen=True, slots=True)
class Cuts:
    """Runs in two parts, between which states are saved.

    Attributes:
        before, behind: the first parts of all runs, and the second parts of those that are cut.
        sources, targets: [n] int64, slots of the states, and those that receive them between the parts.
        tails: [t] int64, the tokens of the second parts.
    """

    before: StateRuns
    behind: StateRuns
    sources: Tensor
    targets: Tensor
    tails: Tensor

    def compute(self, call: Callable[[StateRuns], Tensor], states: Tensor) -> Tensor:
        """Return the result of a recurrence for all tokens, [T, ...]; save its states."""
        out = call(self.before)
        self._save(states)
        return out.index_copy_(0, self.tails, call(self.behind).index_select(0, self.tails))

    def compute_whole(self, call: Callable[[StateRuns], Tensor], whole: StateRuns, states: Tensor) -> Tensor:
        """Return the result of an op for the whole runs, which need not be one of each token; save its states."""
        slots = whole.slots.long()
        kept = states.index_select(0, slots)
        call(self.before)
        self._save(states)
        states.index_copy_(0, slots, kept)
        return call(whole)

    def _save(self, states: Tensor) -> None:
        states.index_copy_(0, self.targets, states.index_select(0, self.sources))
