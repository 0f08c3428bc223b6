"""StartLog: records that a rank logs while it starts, for the log of the process that launched it.

A rank's own log is a file of Ray's without records below WARNING, which ends with the server.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_RECORDS = 100

_QUIRE = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A record: the name of its logger, its level, and its message with the arguments filled in."""

    logger: str
    level: int
    message: str


class StartLog(logging.Handler):
    """Keeps the first MAX_RECORDS records of quire's loggers that are logged in blocks of `recording`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: list[StartRecord] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the records of the block, from INFO on."""
        level = _QUIRE.level
        if _QUIRE.getEffectiveLevel() > logging.INFO:
            _QUIRE.setLevel(logging.INFO)
        _QUIRE.addHandler(self)
        try:
            yield
        finally:
            _QUIRE.removeHandler(self)
            _QUIRE.setLevel(level)

    def take(self) -> tuple[StartRecord, ...]:
        """Return the records that were kept since the last call."""
        records, self._records = tuple(self._records), []
        return records

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record. Warnings are also printed where no other handler does: the end of stderr is in errors."""
        if len(self._records) < MAX_RECORDS:
            self._records.append(StartRecord(record.name, record.levelno, record.getMessage()))
        last_resort = logging.lastResort
        if last_resort is not None and record.levelno >= last_resort.level and not logging.root.handlers:
            last_resort.handle(record)
