"""WatchedFiles: content of files that is read again after they have changed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from ...proto.errors import ConfigError

# The files are looked at this often, at most: a stat takes microseconds, or milliseconds over a network.
INTERVAL_S = 1.0

T = TypeVar("T")
# Returns the current content.
Source = Callable[[], T]

_log = logging.getLogger(__name__)


def constant(content: T) -> Source[T]:
    """Return a source whose content never changes."""
    return lambda: content


class WatchedFiles(Generic[T]):
    """Content of files, which is read again when it is used after they have changed.

    Content that cannot be read any more keeps its last valid state; the problem is logged once per change.

    Args:
        paths: the files; a change of one of them reads all.
        read: returns the content. Raises ConfigError.
        description: name of the content in the log.
        clock: seconds; monotonic.

    Raises:
        ConfigError: the content cannot be read at first.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        description: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._read, self._description, self._clock = tuple(paths), read, description, clock
        self._looked_at = clock()
        # Before reading: a change while they are read is found at the next look.
        self._version = _version(self._paths)
        self._content = read()

    def __call__(self) -> T:
        """Return the content of the files, at most INTERVAL_S old. For any thread."""
        now = self._clock()
        if now - self._looked_at >= INTERVAL_S:
            self._looked_at = now
            self._look()
        return self._content

    def _look(self) -> None:
        version = _version(self._paths)
        if version == self._version:
            return
        self._version = version
        try:
            self._content = self._read()
        except ConfigError as error:
            _log.error(
                "%s changed but cannot be used, so the last valid one stays: %s", self._description, error
            )
        else:
            _log.info("%s changed and was read again", self._description)


def _version(paths: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """Return what changes with every change of a file: a replaced file has another inode."""
    return tuple(_version_of(path) for path in paths)


def _version_of(path: Path) -> tuple[int, ...]:
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
