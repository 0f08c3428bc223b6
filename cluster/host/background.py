"""Background tasks: what should go on until it is cancelled, and must not end unheard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)


def run_in_background(
    work: Coroutine[Any, Any, None],
    what: str,
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> asyncio.Task[None]:
    """Begins the work; the caller holds the task and cancels it.

    Args:
        what: names it in the log, should it fail; asyncio itself tells of that only once nobody holds the task.
        on_failure: called then.
    """

    def look(task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("%s has failed", what, exc_info=error)
        on_failure(error)

    task = asyncio.create_task(work, name=what)
    task.add_done_callback(look)
    return task
