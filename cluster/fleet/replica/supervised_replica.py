"""SupervisedReplica: a running replica whose scheduler is replaced when it ends, on a single host and in a fleet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from ....proto.errors import QuireError, RankFailed, ReplicaUnavailable
from .client import ReplicaClient
from .record import ReplicaRecord

# Replacements in a time, after which the replica is given up.
MAX_REPLACEMENTS = 5
REPLACEMENT_WINDOW_S = 300.0
# For the end of a scheduler whose connection was lost; its own error says more.
END_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


class LiveReplica(Protocol):
    """A replica whose processes run; implemented by `replica.Replica`.

    Attributes:
        failure: completes when the replica ends: with the error, or with None if it was closed.
    """

    @property
    def record(self) -> ReplicaRecord: ...
    @property
    def failure(self) -> Future[QuireError | None]: ...
    def close(self) -> None:
        """End the replica's processes; blocks."""
        ...


ReplicaT = TypeVar("ReplicaT", bound=LiveReplica)


class SupervisedReplica(Generic[ReplicaT]):
    """A replica and its owner's client of it. For one event loop.

    Args:
        connect: returns a client of a replica, not started.
        replace: starts another scheduler for a replica; its second argument counts from 2.
        clock: monotonic time in seconds.

    Attributes:
        live: the replica with its present scheduler.
        client: client of the present scheduler. It sends no requests, which an operator's command may have refused.
    """

    def __init__(
        self,
        live: ReplicaT,
        connect: Callable[[ReplicaRecord], ReplicaClient],
        replace: Callable[[ReplicaT, int], Awaitable[ReplicaT]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._replace = replace
        self._clock = clock
        self._replaced_at: deque[float] = deque(maxlen=MAX_REPLACEMENTS)
        self._num_schedulers = 1
        self.live, self.client = live, self._started_client(live)

    async def wait_until_failed(self) -> QuireError:
        """Wait until the scheduler ends, stays silent or cannot be reached; return why."""
        reason = await self.client.wait_until_failed()
        ended = asyncio.wrap_future(self.live.failure)
        await asyncio.wait((ended,), timeout=END_TIMEOUT_S)
        error = ended.result() if ended.done() and not ended.cancelled() else None
        return error or ReplicaUnavailable(reason)

    async def replace_scheduler(self, error: QuireError) -> None:
        """Start another scheduler for the ranks, which keep their weights.

        Args:
            error: the reason. A replica that failed on a rank has tried to rebuild its ranks itself.

        Raises:
            QuireError: the replica is given up: it failed on a rank or too often, or there is no other scheduler.
        """
        if isinstance(error, RankFailed):
            raise error
        self._count(error)
        self._num_schedulers += 1
        _log.warning("replacing the scheduler of %s: %s", self.live.record.replica_id, error)
        try:
            live = await self._replace(self.live, self._num_schedulers)
        except QuireError as problem:
            raise ReplicaUnavailable(f"{error}; it could not be replaced: {problem}") from problem
        failed, self.live, self.client = self.client, live, self._started_client(live)
        await failed.close()

    async def close(self) -> None:
        """Close the client; the replica runs on."""
        await self.client.close()

    def _started_client(self, live: ReplicaT) -> ReplicaClient:
        client = self._connect(live.record)
        client.start()
        client.fail_after(live.failure)
        return client

    def _count(self, error: QuireError) -> None:
        """Count a replacement. Raises ReplicaUnavailable if there were too many."""
        now = self._clock()
        if len(self._replaced_at) == MAX_REPLACEMENTS and now - self._replaced_at[0] < REPLACEMENT_WINDOW_S:
            raise ReplicaUnavailable(
                f"{error}; given up: its scheduler failed {MAX_REPLACEMENTS + 1} times in "
                f"{now - self._replaced_at[0]:.0f} s"
            )
        self._replaced_at.append(now)
