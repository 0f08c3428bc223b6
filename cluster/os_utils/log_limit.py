"""RepeatLimit: keeps a fault that every call causes from filling the log."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

# Records alike that are logged per interval; a traceback is 2 to 8 kB.
MAX_REPEATS = 10
INTERVAL_S = 60.0
_MAX_KINDS = 1024


@dataclass(slots=True)
class _Window:
    started_at: float
    num_seen: int = 0


class RepeatLimit(logging.Filter):
    """Filter that passes MAX_REPEATS records of one kind per INTERVAL_S. For handlers.

    Records are of one kind if they have the logger, the level and the text before its arguments are filled in. The
    first record of a later interval says how many were left out. Records below WARNING pass.

    Args:
        clock: seconds; monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: OrderedDict[tuple[str, int, str], _Window] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        if record.levelno < logging.WARNING:
            return True
        kind, now = (record.name, record.levelno, str(record.msg)), self._clock()
        window = self._windows.setdefault(kind, _Window(now))
        self._windows.move_to_end(kind)
        if len(self._windows) > _MAX_KINDS:
            self._windows.popitem(last=False)
        if now - window.started_at >= INTERVAL_S:
            num_left_out = window.num_seen - MAX_REPEATS
            window.started_at, window.num_seen = now, 0
            if num_left_out > 0:
                record.msg = f"{record.getMessage()} ({num_left_out} records like this were left out)"
                record.args = None
        window.num_seen += 1
        return window.num_seen <= MAX_REPEATS
