"""TenantConcurrency: threads for work that takes long, with a limit of each tenant's concurrent calls.

Rendering and tokenizing 3 MB takes seconds, and compiling a grammar up to 10 s. Without the limit, a few such calls
of one tenant held every thread of the gateway and every worker process, and the conversations of all others waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ....proto.errors import Overloaded

# Calls of one tenant. Fewer than there are worker processes of each kind, so that another tenant finds one free.
MAX_CONCURRENT = 2
# Until fewer calls of the tenant run.
QUEUE_TIMEOUT_S = 30.0
_MAX_THREADS = 64

T = TypeVar("T")


@dataclass(slots=True)
class _Tenant:
    """A tenant with calls.

    Attributes:
        num_calls: number of calls that run or wait.
    """

    limit: asyncio.Semaphore
    num_calls: int = 0


class TenantConcurrency:
    """Runs functions in threads, as many at once as the limit allows each tenant. For one event loop."""

    def __init__(self, max_concurrent: int = MAX_CONCURRENT) -> None:
        self._max_concurrent = max_concurrent
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="tenant")
        self._tenants: dict[str, _Tenant] = {}  # those with calls

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Return what `work` returns. It counts until it has ended, also if the caller is canceled.

        Raises:
            Overloaded: the tenant's earlier calls have not ended in time.
        """
        entry = self._tenants.setdefault(tenant, _Tenant(asyncio.Semaphore(self._max_concurrent)))
        entry.num_calls += 1
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                await entry.limit.acquire()
        except BaseException as error:
            self._leave(tenant, entry)
            if isinstance(error, TimeoutError):
                problem = (
                    f"earlier requests of the tenant were not checked in {QUEUE_TIMEOUT_S:g} s; retry later"
                )
                raise Overloaded(problem) from None
            raise
        loop = asyncio.get_running_loop()

        def on_end(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, tenant, entry)

        future = self._threads.submit(work)
        future.add_done_callback(on_end)
        return await asyncio.wrap_future(future)

    def _end(self, tenant: str, entry: _Tenant) -> None:
        entry.limit.release()
        self._leave(tenant, entry)

    def _leave(self, tenant: str, entry: _Tenant) -> None:
        entry.num_calls -= 1
        if not entry.num_calls:
            del self._tenants[tenant]
