"""MatchTime: finds the rows whose matchers take more processor time than a constraint may take from all rows.

The libraries limit the work of one mask, but not that of a token: matching ``s ::= s s s | s s | "a"`` takes 60 ms
per token after 300 tokens, and all rows of a step wait for it. A matcher of JSON schemas takes 0.05 ms per token, and
the slowest of 73 schemas 0.5 ms (131,072 tokens, AMD EPYC).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .row_constraint import RowConstraint

# Processor time that a row may take for each of its tokens, and beyond that in all.
TIME_PER_TOKEN_S = 0.001
EXTRA_TIME_S = 0.1
# Rows are measured for so many steps after one in which all of them together took this time.
SLOW_STEP_S = 0.01
NUM_WATCHED_STEPS = 64

Clock = Callable[[], float]


class MatchTime:
    """Processor time of the rows' matchers. Measuring a row takes 1 us, so it is done only after a slow step.

    Args:
        clock: seconds of processor time of the thread, which do not depend on the load of the machine.
    """

    def __init__(self, clock: Clock = time.thread_time) -> None:
        self._clock = clock
        self._num_watched = 0  # steps in which rows are still measured

    @property
    def is_watching(self) -> bool:
        """Rows are measured in this step."""
        return self._num_watched > 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the matching of a whole step, or of a sequence that is replayed."""
        started = self._clock()
        yield
        is_slow = self._clock() - started > SLOW_STEP_S
        self._num_watched = NUM_WATCHED_STEPS if is_slow else max(0, self._num_watched - 1)

    @contextmanager
    def row(self, constraint: RowConstraint, num_tokens: int = 0) -> Iterator[None]:
        """Measure a part of one row's matching, in which it advances by `num_tokens`."""
        started = self._clock()
        try:
            yield
        finally:
            taken_s = self._clock() - started - num_tokens * TIME_PER_TOKEN_S
            constraint.extra_time_s = max(0.0, constraint.extra_time_s + taken_s)


def is_too_slow(constraint: RowConstraint) -> bool:
    """Return whether a row has taken too much time."""
    return constraint.extra_time_s > EXTRA_TIME_S


_MOST = f"{TIME_PER_TOKEN_S * 1e3:g} ms per token"
TOO_SLOW = f"its form takes more than {_MOST} to match; use one that is less ambiguous"
