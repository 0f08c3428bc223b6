"""The event loop of a process: how it is run, its background tasks, and waits for changes of its state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


def run_event_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in uvloop's event loop and return its result, as `asyncio.run` does in Python's own."""
    import uvloop  # the controller and LLM use the rest of this module without it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


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


class ChangeNotifier:
    """Wakes every waiter on each change. For one event loop.

    A waiter checks its condition and then awaits `wait`, with no other await in between: so no change is missed.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake everything that waits now; later waiters wait for the next change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self) -> None:
        """Return at the next change."""
        await self._changed.wait()
