"""ReplacementLimit: how often the scheduler of one replica may be replaced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ....proto.errors import QuireError, ReplicaUnavailable

# Replacements in a time, after which the replica is given up.
MAX_REPLACEMENTS = 5
REPLACEMENT_WINDOW_S = 300.0


class ReplacementLimit:
    """Counts the replacements of one replica's scheduler.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replaced_at: deque[float] = deque(maxlen=MAX_REPLACEMENTS)

    def count(self, error: QuireError) -> None:
        """Count a replacement that `error` makes necessary.

        Raises:
            ReplicaUnavailable: there were too many; says so after `error`.
        """
        now = self._clock()
        if len(self._replaced_at) == MAX_REPLACEMENTS and now - self._replaced_at[0] < REPLACEMENT_WINDOW_S:
            since_s = now - self._replaced_at[0]
            raise ReplicaUnavailable(
                f"{error}; given up: its scheduler failed {MAX_REPLACEMENTS + 1} times in {since_s:.0f} s"
            )
        self._replaced_at.append(now)
