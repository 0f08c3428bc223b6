"""Logging setup of quire's server processes: readable text or JSON."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


_DATE = "%Y-%m-%d %H:%M:%S"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# What moves a terminal's cursor or begins a line, other than tabs and newlines.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
# Attributes of every record; the others were passed as `extra`.
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def log_to_stderr(level: str = "info", log_format: str = "text") -> None:
    """Log warnings of all libraries, and quire's own records from a level on, to standard error.

    Repeated warnings and errors are limited, so that no caller can fill the disk with them.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        log_format: ``text``, or ``json`` for one object per line.
    """
    formatter = JsonFormatter() if log_format == "json" else TextFormatter(_TEXT, _DATE)
    logging.basicConfig()
    logging.getLogger("quire").setLevel(level.upper())
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
        handler.addFilter(RepeatLimit())


class TextFormatter(logging.Formatter):
    """A record as text, of which a caller's part can neither look like another record nor control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        escaped = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], super().format(record))
        return escaped.replace("\n", "\n  ")


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, and what was passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{when}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        # Ray adds attributes to every record, whose names begin with an underscore.
        given = (name for name in vars(record) if name not in _PLAIN and not name.startswith("_"))
        fields |= {name: getattr(record, name) for name in given}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)
