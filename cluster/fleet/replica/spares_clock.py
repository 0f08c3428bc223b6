"""SparesClock: decides when a group of ranks has spare processes started.

A spare process takes seconds of a core to start, which the requests of a small machine would lack: on two cores 860
tokens per second became 600.
"""

from __future__ import annotations

# Spares start once no step was computed for this long,
IDLE_S = 2.0
# or, in a group that is never idle, this long after its first step.
BUSY_S = 60.0


class SparesClock:
    """The moment of one life of the ranks. Times are in seconds, of a clock that never goes back."""

    def __init__(self) -> None:
        self._first_step_s: float | None = None
        self._last_step_s = 0.0
        self._is_done = False

    def note_step(self, now_s: float) -> bool:
        """Note that a step has ended; return True if spares are to be started now."""
        if self._first_step_s is None:
            self._first_step_s = now_s
        self._last_step_s = now_s
        return self._is_due(now_s - self._first_step_s >= BUSY_S)

    def note_idle(self, now_s: float) -> bool:
        """Note that no step is computed; return True if spares are to be started now."""
        has_stepped = self._first_step_s is not None
        return self._is_due(has_stepped and now_s - self._last_step_s >= IDLE_S)

    def _is_due(self, is_time: bool) -> bool:
        is_due = is_time and not self._is_done
        self._is_done = self._is_done or is_due
        return is_due
