"""BlockingCalls: threads for calls that would block the fleet's event loop, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ....proto.errors import ReplicaUnavailable

CALL_TIMEOUT_S = 60.0
# Concurrent calls.
MAX_CALLS = 32
# Concurrent launches. Each occupies a thread while it waits for room; further launches wait for one to end.
MAX_LAUNCHES = 512

T = TypeVar("T")


class BlockingCalls:
    """Two thread pools: launches may wait for machines for a long time and must not delay other calls."""

    def __init__(self) -> None:
        self._calls = ThreadPoolExecutor(MAX_CALLS, "fleet")
        self._launches = ThreadPoolExecutor(MAX_LAUNCHES, "launch")

    async def call(self, what: str, function: Callable[..., T], *arguments: object) -> T:
        """Return the function's result. A call that has begun continues if its caller is canceled.

        Args:
            what: names the call in errors, as in ``reading the nodes``.

        Raises:
            ReplicaUnavailable: the call took more than CALL_TIMEOUT_S.
        """
        result = asyncio.wrap_future(self._calls.submit(function, *arguments))
        await asyncio.wait((result,), timeout=CALL_TIMEOUT_S)
        if not result.done():
            result.cancel()
            raise ReplicaUnavailable(f"{what} took more than {CALL_TIMEOUT_S:g} s")
        return result.result()

    def launch(self, function: Callable[[], T]) -> Future[T]:
        """Begin a launch. Launches have deadlines of their own."""
        return self._launches.submit(function)

    def close(self) -> None:
        """Cancel calls that have not begun, without waiting for the others."""
        for pool in (self._calls, self._launches):
            pool.shutdown(wait=False, cancel_futures=True)
