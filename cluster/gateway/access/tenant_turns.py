"""TenantTurns: threads for work that takes long, of which each tenant has a few at once.

Rendering and tokenizing 3 MB takes seconds, and compiling a grammar up to 10 s. Without turns, a few such calls of
one tenant held every thread of the gateway and every worker process, and the conversations of all others waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ....proto.errors import Overloaded

# Of one tenant. Fewer than there are worker processes of each kind, so that another tenant finds one free.
MAX_AT_ONCE = 2
# Until a turn of the tenant.
QUEUE_TIMEOUT_S = 30.0
_MAX_THREADS = 64

T = TypeVar("T")


@dataclass(slots=True)
class _Place:
    """The turns of one tenant.

    Attributes:
        num_calls: that run or wait.
    """

    turns: asyncio.Semaphore
    num_calls: int = 0


class TenantTurns:
    """Runs functions in threads, a few at once for each tenant. For one event loop."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE) -> None:
        self._max_at_once = max_at_once
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="turn")
        self._places: dict[str, _Place] = {}  # of tenants with calls

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Return what `work` returns. A turn ends when `work` has ended, also if the caller is canceled.

        Raises:
            Overloaded: the tenant's earlier calls have not ended in time.
        """
        place = self._places.setdefault(tenant, _Place(asyncio.Semaphore(self._max_at_once)))
        place.num_calls += 1
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                await place.turns.acquire()
        except BaseException as error:
            self._leave(tenant, place)
            if isinstance(error, TimeoutError):
                problem = (
                    f"earlier requests of the tenant were not checked in {QUEUE_TIMEOUT_S:g} s; retry later"
                )
                raise Overloaded(problem) from None
            raise
        loop = asyncio.get_running_loop()

        def on_end(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end_turn, tenant, place)

        future = self._threads.submit(work)
        future.add_done_callback(on_end)
        return await asyncio.wrap_future(future)

    def _end_turn(self, tenant: str, place: _Place) -> None:
        place.turns.release()
        self._leave(tenant, place)

    def _leave(self, tenant: str, place: _Place) -> None:
        place.num_calls -= 1
        if not place.num_calls:
            del self._places[tenant]
