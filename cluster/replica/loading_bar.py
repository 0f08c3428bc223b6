"""LoadingBar: progress on a terminal of the bytes of weights that each rank has read."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


class LoadingBar:
    """A progress bar per rank while it loads its weights. Shows nothing if the console is not a terminal.

    Args:
        num_ranks: number of ranks that load.
        console: None for standard error.
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
        """Show a rank's progress in bytes: read so far, and expected in total."""
        self._progress.update(self._tasks[rank], completed=num_read, total=num_expected)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
