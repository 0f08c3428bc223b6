"""InFlightSteps: the steps whose results are awaited, and the counter of step ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....proto.block_tables import IntArray, RowArray

NO_ROWS: RowArray = np.zeros(0, np.intp)
NO_ROWS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step whose result is awaited.

    Attributes:
        rows: rows that sample, ascending.
        first_rows: of these, the rows that sample their first token after a prefill.
        num_tokens: tokens computed in the step, over all rows, without drafted ones.
        planned_at: on the scheduler's clock.
        num_freed: RowState.num_freed when the step was planned.
        draft_lens: most drafted tokens of each of `rows`; None if there are none.
        chunk_rows: rows whose prompt tokens it computes.
        pooled_rows: of these, the pooled rows whose last token it computes, ascending.
        is_command: the ranks carry out an EngineCommand in it, which takes a while.
        encodes: media_ids of the images that are encoded in it, which its number of tokens does not show.
    """

    step_id: int
    rows: RowArray
    first_rows: list[int]
    num_tokens: int
    planned_at: float
    num_freed: int = 0
    draft_lens: IntArray | None = None
    chunk_rows: tuple[int, ...] = ()
    pooled_rows: tuple[int, ...] = ()
    is_command: bool = False
    encodes: tuple[int, ...] = ()

    @property
    def has_results(self) -> bool:
        """Return whether its result has values that the ranks computed, so that it comes after the computation."""
        return self.rows.size > 0 or bool(self.pooled_rows)

    @property
    def max_draft_len(self) -> int:
        return 0 if self.draft_lens is None else int(self.draft_lens.max())

    @property
    def all_rows(self) -> set[int]:
        return {*self.rows.tolist(), *self.chunk_rows}

    @property
    def num_prompt_tokens(self) -> int:
        """Return all tokens except one for each row that decodes."""
        return self.num_tokens - (self.rows.size - len(self.first_rows))


class InFlightSteps:
    """Queue of steps in flight, oldest first. Step ids count from 1."""

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._steps)

    @property
    def max_row_tokens(self) -> int:
        """Return the most tokens that a row may gain by the steps in flight."""
        return sum(1 + step.max_draft_len for step in self._steps)

    @property
    def rows(self) -> set[int]:
        """Return the rows of all steps in flight."""
        return {row for step in self._steps for row in step.all_rows}

    def newest_rows(self, count: int) -> list[RowArray]:
        """Return the rows that sample in each of the newest `count` steps."""
        return [step.rows for step in list(self._steps)[-count:]]

    @property
    def repeated_rows(self) -> RowArray:
        """Return the rows that sample in more than one step."""
        every = [NO_ROWS, *(step.rows for step in self._steps)]
        rows, counts = np.unique(np.concatenate(every), return_counts=True)
        repeated: RowArray = rows[counts > 1]
        return repeated

    @property
    def next_id(self) -> int:
        """Return the id of the step that `add` takes next."""
        return self._last_id + 1

    @property
    def newest_id(self) -> int | None:
        """Return the newest step in flight, or None. It may still use blocks that are released now."""
        return self._steps[-1].step_id if self._steps else None

    def find(self, step_id: int | None) -> InFlightStep | None:
        """Return the step with that id, the oldest if there is none, or None if no step is in flight."""
        return next((step for step in self._steps if step.step_id == step_id), self.oldest)

    @property
    def oldest(self) -> InFlightStep | None:
        """Return the step whose result is due next, or None."""
        return self._steps[0] if self._steps else None

    def add(self, step: InFlightStep) -> None:
        assert step.step_id == self.next_id, f"step {step.step_id} was planned, {self.next_id} is next"
        self._last_id = step.step_id
        self._steps.append(step)

    def repeat(self, step: InFlightStep, planned_at: Sequence[float]) -> None:
        """Add equal steps, planned at each of these times, and remove as many of the oldest steps."""
        kept, self._last_id = len(self._steps), self._last_id + len(planned_at)
        first_id = self._last_id + 1 - min(kept, len(planned_at))
        for step_id, at in enumerate(list(planned_at)[-kept:] if kept else [], first_id):
            self._steps.append(replace(step, step_id=step_id, planned_at=at))
            self._steps.popleft()

    def pop(self) -> InFlightStep:
        """Remove the oldest step."""
        return self._steps.popleft()
