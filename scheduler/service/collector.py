"""IdleCollector: full garbage collections of a scheduler's process, between requests instead of within a step."""

from __future__ import annotations

import gc

# Shortest time between two full collections of an idle process, and the longest without one of a busy process: its
# rows are thousands of objects, which take some milliseconds.
IDLE_INTERVAL_S = 60.0
BUSY_INTERVAL_S = 3600.0
# Collections of the middle generation before a full one, which Python would begin by itself.
_NEVER = 1 << 30


class IdleCollector:
    """Runs the full collections of this process, which has no other threads with cycles of their own.

    The scheduler makes no cycles; exceptions and libraries make a few. The two younger generations are collected by
    Python as ever, which takes less than a millisecond.
    """

    def __init__(self) -> None:
        self._collected_at: float | None = None

    def start(self) -> None:
        """Take over: what is there now is never visited again. All modules would take 0.1 s."""
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)

    def turn(self, now: float, *, is_idle: bool) -> None:
        """Collect if it is time to; call it regularly, and with `is_idle` while there is no work."""
        if self._collected_at is None:
            self._collected_at = now
        if now - self._collected_at >= (IDLE_INTERVAL_S if is_idle else BUSY_INTERVAL_S):
            gc.collect()
            self._collected_at = now
