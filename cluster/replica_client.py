"""ReplicaClient: an asyncio process's end of the line to one replica's scheduler."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress

import zmq
import zmq.asyncio

from ..proto.errors import ProtocolError, QuireError, ReplicaUnavailable
from ..proto.stream import (
    Abort,
    Finish,
    FinishReason,
    GatewayMessage,
    ReplicaStatus,
    StatusQuery,
    Stop,
    TokenBatch,
    decode,
    encode,
)
from .news import News, split
from .requests import Request

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
_MAX_HANDLE = (1 << 31) - 1  # handles travel as int32


class RunningSequence:
    """A submitted sequence: an asynchronous iterator of its News, for one reader.

    News that the reader has not taken grow together, so a slow reader costs one item and slows nobody.
    """

    def __init__(self, client: ReplicaClient, handle: int) -> None:
        self.handle = handle
        self._client = client
        self._pending: News | None = None
        self._error: QuireError | None = None
        self._ended = False  # nothing will come after what is pending
        self._stopped = False
        self._arrival = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[News]:
        return self

    async def __anext__(self) -> News:
        """The news since the last call.

        Raises:
            ReplicaUnavailable: the replica failed, or the client was closed.
            RequestAborted: `end` was called with it.
        """
        while self._pending is None:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        news, self._pending = self._pending, None
        return news

    def stop(self) -> None:
        """A stop string was found: the sequence ends, and its Finish comes. Safe to call again."""
        if not (self._stopped or self._ended):
            self._client.send(Stop(self.handle))
        self._stopped = True

    def abort(self) -> None:
        """Ends the sequence and frees its blocks; does nothing when it has ended."""
        self._client.forget(self.handle, tell_replica=not self._ended)
        self._ended = True

    def end(self, error: QuireError) -> None:
        """Aborts the sequence, and its reader gets the error."""
        self.abort()
        self.fail(error)

    def put(self, news: News) -> None:
        """For the client only: what came in."""
        if self._pending is None:
            self._pending = news
        else:
            self._pending.extend(news)
        self._ended = news.finish is not None
        self._arrival.set()

    def fail(self, error: QuireError) -> None:
        """For the client only: nothing will come any more, and why."""
        self._ended, self._error, self._pending = True, error, None
        self._arrival.set()


class ReplicaClient:
    """Submits sequences to one replica and hands their news to whoever reads them. For one event loop.

    Args:
        address: endpoint of the scheduler's ROUTER.
        replica_id: how errors name the replica.
        patience_s: a replica that says nothing for this long has failed. A step may take as long as the
            scheduler's step_timeout_s, and the scheduler may be silent meanwhile.
        heartbeat_s: how often it is asked for its status.
    """

    def __init__(
        self, address: str, replica_id: str, *, patience_s: float = 65.0, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._address = address
        self.replica_id = replica_id
        self._patience_s = patience_s
        self._heartbeat_s = heartbeat_s
        self._sequences: dict[int, RunningSequence] = {}
        self._handles = itertools.count(1)
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[ReplicaStatus]] = {}
        self._problem = f"replica {replica_id} has not answered yet"
        self._failed = False
        self._is_well, self._is_unwell = asyncio.Event(), asyncio.Event()
        self._heard_at = time.monotonic()
        self._uptime_s = 0.0
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def problem(self) -> str:
        """Why the replica cannot be relied on now; empty when it answers and is well."""
        return self._problem

    @property
    def num_running(self) -> int:
        """Sequences submitted that have not ended."""
        return len(self._sequences)

    def start(self) -> None:
        """Connects. Call it in the event loop that will use the client."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Never blocks: what waits to be sent is bounded by the heartbeat, which ends a silent replica's sequences.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(self._address)
        self._heard_at = time.monotonic()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._keep_asking())]

    async def close(self) -> None:
        """Ends what still runs and closes the connection. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._socket is not None:
            for handle in self._sequences:
                self.send(Abort(handle))
            self._fail_all("its client was closed")
            # The aborts, if any, are given a moment to leave.
            self._context.destroy(linger=200)
            self._socket = None

    def submit(self, request: Request) -> RunningSequence:
        """Hands the request to the replica.

        Raises:
            ReplicaUnavailable: the replica is known to have failed.
        """
        if self._socket is None:
            raise ReplicaUnavailable(f"the client of replica {self.replica_id} is closed")
        if self._failed:
            raise ReplicaUnavailable(self._problem)
        handle = next(self._handles) & _MAX_HANDLE
        sequence = self._sequences[handle] = RunningSequence(self, handle)
        self.send(request.submit(handle))
        return sequence

    def forget(self, handle: int, *, tell_replica: bool) -> None:
        """Takes no more news of a handle; with `tell_replica`, ends it there."""
        if self._sequences.pop(handle, None) is not None and tell_replica:
            self.send(Abort(handle))

    async def status(self, timeout_s: float) -> ReplicaStatus:
        """The replica's state now.

        Raises:
            ReplicaUnavailable: no answer in time.
        """
        query_id = next(self._query_ids)
        self._queries[query_id] = asyncio.get_running_loop().create_future()
        try:
            self.send(StatusQuery(query_id))
            async with asyncio.timeout(timeout_s):
                return await self._queries[query_id]
        except TimeoutError:
            reason = f"replica {self.replica_id} did not answer a status query in {timeout_s:g} s"
            raise ReplicaUnavailable(reason) from None
        finally:
            del self._queries[query_id]

    def fail(self, reason: str) -> None:
        """The owner knows that the replica is gone: ends every sequence with ReplicaUnavailable."""
        self._failed = True
        self._set_problem(f"replica {self.replica_id} failed: {reason}")
        self._fail_all(reason)

    def watch(self, failure: Future[QuireError | None]) -> None:
        """Fails as soon as the future ends, in whichever thread: with an error, or None for a replica that closed."""
        loop = asyncio.get_running_loop()

        def tell(ended: Future[QuireError | None]) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(self.fail, str(ended.result() or "it was closed"))

        failure.add_done_callback(tell)

    async def wait_until(self, *, well: bool) -> None:
        """Returns once the replica answers without a problem, or (`well` false) once it has one."""
        await (self._is_well if well else self._is_unwell).wait()

    def _fail_all(self, reason: str) -> None:
        sequences, self._sequences = self._sequences, {}
        for sequence in sequences.values():
            sequence.fail(ReplicaUnavailable(f"replica {self.replica_id} failed: {reason}"))

    def _set_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            logger.warning("%s", problem)
        self._problem = problem
        for event, holds in ((self._is_well, not problem), (self._is_unwell, bool(problem))):
            if holds:
                event.set()
            else:
                event.clear()

    def send(self, message: GatewayMessage) -> None:
        """Never blocks; nothing is sent once the client is closed."""
        if self._socket is not None:
            self._socket.send(encode(message))

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            frame = await self._socket.recv()
            self._heard_at = time.monotonic()
            try:
                message = decode(frame)
            except ProtocolError as error:
                logger.error("replica %s: %s", self.replica_id, error)
                continue
            if isinstance(message, TokenBatch):
                self._deliver(message)
            elif isinstance(message, ReplicaStatus):
                self._take_status(message)

    def _deliver(self, batch: TokenBatch) -> None:
        for handle, news in split(batch):
            sequence = self._sequences.get(handle)
            if sequence is None:  # aborted meanwhile
                continue
            sequence.put(news)
            if news.finish is not None:
                del self._sequences[handle]
                self._look_at(news.finish)

    def _look_at(self, finish: Finish) -> None:
        """A sequence that a broken rank ended tells of it before the next heartbeat does."""
        if finish.reason is FinishReason.ERROR and finish.grpc_status == ReplicaUnavailable.grpc_status:
            self._failed = True
            self._set_problem(finish.error)

    def _take_status(self, status: ReplicaStatus) -> None:
        if status.uptime_s < self._uptime_s:
            self._fail_all("it was restarted and knows nothing of earlier sequences")
        self._uptime_s = status.uptime_s
        self._failed = False
        self._set_problem(status.problem)
        query = self._queries.get(status.query_id)
        if query is not None and not query.done():
            query.set_result(status)

    async def _keep_asking(self) -> None:
        """The heartbeat: asks for the status at intervals, and fails a replica that stays silent."""
        while True:
            self.send(StatusQuery(next(self._query_ids)))
            await asyncio.sleep(self._heartbeat_s)
            silence_s = time.monotonic() - self._heard_at
            if silence_s > self._patience_s:
                self.fail(f"it has been silent for {silence_s:.0f} s")
