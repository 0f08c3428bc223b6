"""BlockingCalls: what blocks is done beside the fleet's event loop, and has a deadline there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ...proto.errors import ReplicaUnavailable

CALL_TIMEOUT_S = 60.0
# Calls that run at once.
MAX_CALLS = 32
# Launches wait for room, each in a thread of its own. Beyond so many, the next wait for the first.
MAX_LAUNCHES = 512

T = TypeVar("T")


class BlockingCalls:
    """Two sets of threads: launches take as long as machines do to come, and must hold up nothing else."""

    def __init__(self) -> None:
        self._calls = ThreadPoolExecutor(MAX_CALLS, "fleet")
        self._launches = ThreadPoolExecutor(MAX_LAUNCHES, "launch")

    async def call(self, what: str, function: Callable[..., T], *arguments: object) -> T:
        """The function's result. A call that has begun goes on when its caller is cancelled.

        Raises:
            ReplicaUnavailable: it took too long; says what did.
        """
        result = asyncio.wrap_future(self._calls.submit(function, *arguments))
        await asyncio.wait((result,), timeout=CALL_TIMEOUT_S)
        if not result.done():
            result.cancel()
            raise ReplicaUnavailable(f"{what} took more than {CALL_TIMEOUT_S:g} s")
        return result.result()

    def launch(self, make: Callable[[], T]) -> Future[T]:
        """Begins a launch, which has deadlines of its own."""
        return self._launches.submit(make)

    def close(self) -> None:
        """Waits for nothing."""
        for pool in (self._calls, self._launches):
            pool.shutdown(wait=False, cancel_futures=True)
