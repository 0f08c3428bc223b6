"""LoadingBar: progress on a terminal of the bytes of weights that each rank has read."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class LoadingBar:
    """A progress bar per rank while it loads its weights. Shows nothing if the console is not a terminal.

    Args:
        num_ranks: number of ranks that load.
        console: None for standard error.
    """

    def __init__(self, num_ranks: int, console: Console | None = None) -> None:
        is_terminal = sys.stderr.isatty() if console is None else console.is_terminal
        # A rank without a terminal does not import rich, which takes 0.1 s.
        self._progress = _make_progress(console) if is_terminal else None
        if self._progress is not None:
            self._tasks = [
                self._progress.add_task(f"weights, rank {rank}", total=None) for rank in range(num_ranks)
            ]

    @property
    def is_shown(self) -> bool:
        return self._progress is not None

    def update(self, rank: int, num_read: int, num_expected: int) -> None:
        """Show a rank's progress in bytes: read so far, and expected in total."""
        if self._progress is not None:
            self._progress.update(self._tasks[rank], completed=num_read, total=num_expected)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _make_progress(console: Console | None) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, console=console or Console(file=sys.stderr), transient=True)
