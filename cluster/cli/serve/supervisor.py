"""ReplicaSupervisor: replaces the scheduler of a server's only replica when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from ....proto.errors import QuireError, RankFailed, ReplicaUnavailable
from ...fleet.replica.client import ReplicaClient
from ...fleet.replica.replacement_limit import ReplacementLimit
from ...gateway.routing.replica_pool import ReplicaPool

_log = logging.getLogger(__name__)


class SupervisedReplica(Protocol):
    """A replica as its supervisor needs it; see `replica.Replica`."""

    failure: Future[QuireError | None]

    @property
    def replica_id(self) -> str: ...


ReplicaT = TypeVar("ReplicaT", bound=SupervisedReplica)


class ReplicaSupervisor(Generic[ReplicaT]):
    """Keeps one replica in a pool. For one event loop.

    A replica that failed on a rank has tried to rebuild its ranks itself, and is not replaced.

    Args:
        connect: returns a started client of the replica.
        replace: starts another scheduler for the replica; may take seconds. Its second argument counts from 2.
        clock: monotonic time in seconds.

    Attributes:
        replica: the present one.
    """

    def __init__(
        self,
        replica: ReplicaT,
        client: ReplicaClient,
        pool: ReplicaPool,
        connect: Callable[[ReplicaT], ReplicaClient],
        replace: Callable[[ReplicaT, int], ReplicaT],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica = replica
        self._client = client
        self._pool = pool
        self._connect = connect
        self._replace = replace
        self._clock = clock
        self._limit = ReplacementLimit(clock)
        self._number = 1

    async def run(self) -> QuireError:
        """Return the error for which the replica is given up. Its requests have ended with the error then."""
        while True:
            error = await self._next_failure()
            if not isinstance(error, RankFailed):
                _log.warning("replacing the scheduler of %s: %s", self.replica.replica_id, error)
                problem = await self._try_to_replace(error)
                if problem is None:
                    continue
                error = problem
            self._pool.retire()
            self._client.fail(str(error))
            return error

    async def _next_failure(self) -> QuireError:
        """Wait until the scheduler ends or stays silent; return why."""
        ended = asyncio.wrap_future(self.replica.failure)
        silent = asyncio.ensure_future(self._wait_until_silent())
        try:
            await asyncio.wait((ended, silent), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result() or ReplicaUnavailable(f"{self.replica.replica_id} ended")
            return ReplicaUnavailable(silent.result())
        finally:
            silent.cancel()

    async def _wait_until_silent(self) -> str:
        """Return the reason why the client gave the replica up although its process lives."""
        while True:
            reason = await self._client.wait_until_failed()
            if self._client.is_silent:
                return reason
            await self._client.wait_until_healthy()

    async def _try_to_replace(self, error: QuireError) -> QuireError | None:
        """Replace the scheduler; return the error for which that failed or was not tried."""
        now = self._clock()
        try:
            self._limit.count(error)
        except ReplicaUnavailable as given_up:
            return given_up
        self._number += 1
        self._pool.remove(self.replica.replica_id, str(error))
        try:
            replica = await asyncio.to_thread(self._replace, self.replica, self._number)
        except QuireError as problem:
            return ReplicaUnavailable(f"{error}; it could not be replaced: {problem}")
        _log.info("%s has a new scheduler after %.2f s", replica.replica_id, self._clock() - now)
        self.replica, self._client = replica, self._connect(replica)
        self._pool.add(self._client)
        return None
