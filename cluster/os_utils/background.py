"""Background tasks that run until canceled and whose failure is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)


def run_in_background(
    work: Coroutine[Any, Any, None],
    name: str,
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> asyncio.Task[None]:
    """Start a task; the caller keeps a reference to it and cancels it.

    Args:
        name: the task's name in the log if it fails; asyncio itself reports a failed task only when it is collected.
        on_failure: called with the error if the task fails.
    """

    def on_done(task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("%s has failed", name, exc_info=error)
        on_failure(error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(on_done)
    return task
