"""Messages of a command that waits for a server."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# No message for what takes a moment.
_INTERVAL_S = 5.0


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def report_wait(
    what: str, report: Callable[[str], object] = _print, interval_s: float = _INTERVAL_S
) -> Iterator[None]:
    """Report what the block waits for, and for how long, at each interval until the block ends."""
    start, is_over = time.monotonic(), threading.Event()

    def run() -> None:
        while not is_over.wait(interval_s):
            report(f"{what}, {time.monotonic() - start:.0f} s")

    reporter = threading.Thread(target=run, name="report_wait", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        is_over.set()
        reporter.join()
