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
from .answer import Answers, Piece
from .news import News, split
from .requests import Request

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
_MAX_HANDLE = (1 << 31) - 1  # handles travel as int32


class RunningRequest:
    """A submitted request: an asynchronous iterator of (answer's index, its News), for one reader.

    News of an answer that the reader has not taken grow together, so a slow reader costs one item an answer and
    slows nobody. The iterator ends when all answers have.

    Args:
        handles: of its answers, by index.
    """

    def __init__(self, client: ReplicaClient, handles: range) -> None:
        self.handles = handles
        self._client = client
        self._pending: dict[int, News] = {}  # index |-> what was not taken, the longest waiting first
        self._open = set(range(len(handles)))  # answers of which more will come
        self._stopped: set[int] = set()
        self._error: QuireError | None = None
        self._arrival = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[tuple[int, News]]:
        return self

    async def __anext__(self) -> tuple[int, News]:
        """An answer's news since they were last taken.

        Raises:
            ReplicaUnavailable: the replica failed, or the client was closed.
            RequestAborted: `end` was called with it.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        index = next(iter(self._pending))
        return index, self._pending.pop(index)

    def stop(self, index: int) -> None:
        """A stop string was found: the answer ends, and its Finish comes. Safe to call again."""
        if index in self._open and index not in self._stopped:
            self._client.send(Stop(self.handles[index]))
        self._stopped.add(index)

    def abort(self) -> None:
        """Ends all answers and frees their blocks; does nothing to those that have ended."""
        self._client.forget(self.handles)
        self._open.clear()

    def end(self, error: QuireError) -> None:
        """Aborts the request, and its reader gets the error."""
        self.abort()
        self.fail(error)

    def put(self, handle: int, news: News) -> None:
        """For the client only: what came in."""
        index = handle - self.handles.start
        if index in self._pending:
            self._pending[index].extend(news)
        else:
            self._pending[index] = news
        if news.finish is not None:
            self._open.discard(index)
        self._arrival.set()

    def fail(self, error: QuireError) -> None:
        """For the client only: nothing will come any more, and why."""
        self._open.clear()
        self._pending.clear()
        self._error = error
        self._arrival.set()


async def follow(running: RunningRequest, answers: Answers) -> AsyncIterator[Piece]:
    """What is to be told of a request, to its end; an answer is stopped at its stop string.

    Raises:
        QuireError: the request ended with it. Its other answers may still run: the caller aborts them.
    """
    async for index, news in running:
        for piece in answers.take(index, news):
            yield piece
        if answers.is_complete(index):
            running.stop(index)


class ReplicaClient:
    """Submits requests to one replica and hands their news to whoever reads them. For one event loop.

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
        self._running: dict[int, RunningRequest] = {}  # handle |-> its request, while the answer runs
        self._next_handle = 1
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
        """Answers of submitted requests that have not ended."""
        return len(self._running)

    def start(self) -> None:
        """Connects. Call it in the event loop that will use the client."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Never blocks: what waits to be sent is bounded by the heartbeat, which ends a silent replica's requests.
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
            for handle in self._running:
                self.send(Abort(handle))
            self._fail_all("its client was closed")
            # The aborts, if any, are given a moment to leave.
            self._context.destroy(linger=200)
            self._socket = None

    def submit(self, request: Request) -> RunningRequest:
        """Hands the request to the replica.

        Raises:
            ReplicaUnavailable: the replica is known to have failed.
        """
        if self._socket is None:
            raise ReplicaUnavailable(f"the client of replica {self.replica_id} is closed")
        if self._failed:
            raise ReplicaUnavailable(self._problem)
        handles = self._take_handles(request.sampling.num_sequences)
        running = RunningRequest(self, handles)
        self._running |= dict.fromkeys(handles, running)
        self.send(request.submit(handles.start))
        return running

    def _take_handles(self, count: int) -> range:
        if self._next_handle + count > _MAX_HANDLE:
            self._next_handle = 1
        self._next_handle += count
        return range(self._next_handle - count, self._next_handle)

    def forget(self, handles: range) -> None:
        """Takes no more news of these handles, and ends those that run."""
        for handle in handles:
            if self._running.pop(handle, None) is not None:
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
        """The owner knows that the replica is gone: ends every request with ReplicaUnavailable."""
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
        requests, self._running = set(self._running.values()), {}
        for running in requests:
            running.fail(ReplicaUnavailable(f"replica {self.replica_id} failed: {reason}"))

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
            running = self._running.get(handle)
            if running is None:  # aborted meanwhile
                continue
            running.put(handle, news)
            if news.finish is not None:
                del self._running[handle]
                self._look_at(news.finish)

    def _look_at(self, finish: Finish) -> None:
        """A sequence that a broken rank ended tells of it before the next heartbeat does."""
        if finish.reason is FinishReason.ERROR and finish.grpc_status == ReplicaUnavailable.grpc_status:
            self._failed = True
            self._set_problem(finish.error)

    def _take_status(self, status: ReplicaStatus) -> None:
        if status.uptime_s < self._uptime_s:
            self._fail_all("it was restarted and knows nothing of earlier requests")
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
