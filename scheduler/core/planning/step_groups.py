"""StepGroups: divides decoding rows among the steps that keep all pipeline stages busy.

While one stage computes a row's token, the others need rows that do not wait for it. So each of P consecutive steps
has a P-th of the rows, and a row is in one of any P. Groups are not stored: the rows that have waited longest come
next, which keeps the groups of the last round and evens them out when rows come and go.
"""

from __future__ import annotations

import numpy as np

from ....proto.block_tables import RowArray
from ..steps.in_flight import NO_ROWS, InFlightSteps


class StepGroups:
    """The order in which decoding rows take part in steps.

    Args:
        num_stages: pipeline stages, P; with one, every row is in every step.
    """

    def __init__(self, num_rows: int, num_stages: int) -> None:
        self._num_stages = num_stages
        self._last_steps = np.zeros(num_rows, np.int64)  # of each row

    @property
    def are_several(self) -> bool:
        """Return whether rows take turns."""
        return self._num_stages > 1

    def choose(self, rows: RowArray, in_flight: InFlightSteps, *, waits_for_rows: bool) -> RowArray:
        """Return the rows that compute a token in the next step, ascending; they come last in the following ones.

        Args:
            rows: with a token to compute, ascending.
            waits_for_rows: nothing else could be in the step, so that it may have rows whose newest token another
                step in flight computes: the first stage then waits for that token.
        """
        if self._num_stages == 1 or not rows.size:
            return rows
        most, num_larger = divmod(int(rows.size), self._num_stages)
        newest = in_flight.newest_rows(self._num_stages - 1)
        if sum(own.size > most for own in newest) < num_larger:
            most += 1
        free = rows[~np.isin(rows, np.concatenate([NO_ROWS, *newest]))]
        if not free.size and waits_for_rows:
            free = rows[~np.isin(rows, in_flight.repeated_rows)]
        most = max(1, most)
        if free.size > most:
            order = np.argsort(self._last_steps[free], kind="stable")
            free = np.sort(free[order[:most]])
        self.note(free, in_flight.next_id)
        return free

    def note(self, rows: RowArray, step_id: int) -> None:
        """Note the rows that sample in a step."""
        self._last_steps[rows] = step_id
