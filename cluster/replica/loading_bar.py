"""LoadingBar: shows on a terminal how many bytes of their weights the ranks have read."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


class LoadingBar:
    """A line for each rank while it loads; nothing at all where nobody watches, as the log tells how long it took.

    Args:
        num_ranks: that load.
        console: where; None: standard error.
    """

    def __init__(self, num_ranks: int, console: Console | None = None) -> None:
        console = console or Console(file=sys.stderr)
        self.is_shown = console.is_terminal
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        self._progress = Progress(*columns, console=console, transient=True, disable=not self.is_shown)
        self._tasks = [
            self._progress.add_task(f"weights, rank {rank}", total=None) for rank in range(num_ranks)
        ]

    def update(self, rank: int, num_read: int, num_expected: int) -> None:
        """Bytes that a rank has read, and those that it will read in all."""
        self._progress.update(self._tasks[rank], completed=num_read, total=num_expected)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
