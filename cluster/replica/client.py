"""ReplicaClient: an asyncio process's end of the line to one replica's scheduler."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, TypeVar

import zmq
import zmq.asyncio

from ...proto.errors import ProtocolError, QuireError, ReplicaUnavailable
from ...proto.stream import (
    Abort,
    CacheReport,
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
from ...proto.transport.network import CurveKeys, connect
from ..host.background import run_in_background
from ..requests.request import Request
from ..requests.request_stream import UpdateQueue
from ..requests.sequence_update import SequenceUpdate, updates_by_handle

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# A replica is given up when it is silent for so long beyond a step's own deadline: from then on its scheduler still
# asks the ranks what they are at.
PATIENCE_S = 10.0
# For aborts to leave when a client is closed.
_LINGER_MS = 200
_MAX_HANDLE = (1 << 31) - 1  # handles travel as int32

ReceiverT = TypeVar("ReceiverT", bound="Receiver")
Listener = Callable[[ReplicaStatus | CacheReport], None]


class Receiver(Protocol):
    """Who is told what a replica says of the answers that it was handed together."""

    def put(self, handle: int, news: SequenceUpdate) -> None: ...

    def fail(self, error: QuireError) -> None:
        """Nothing will come any more."""
        ...


class RunningRequest(UpdateQueue):
    """A request submitted to one replica, to whose end it runs or with which it fails.

    Args:
        handles: of its answers, by index.
    """

    def __init__(self, client: ReplicaClient, handles: range) -> None:
        super().__init__(len(handles))
        self.handles = handles
        self._client = client
        self._stopped: set[int] = set()

    def stop(self, index: int) -> None:
        """See `RequestStream`."""
        if index in self.open and index not in self._stopped:
            self._client.stop(self.handles[index])
        self._stopped.add(index)

    def abort(self) -> None:
        """See `RequestStream`."""
        self._client.forget(self.handles)
        self.open.clear()

    def end(self, error: QuireError) -> None:
        """See `RequestStream`."""
        self.abort()
        self.fail(error)

    def put(self, handle: int, news: SequenceUpdate) -> None:
        """See `Receiver`."""
        self.add(handle - self.handles.start, news)


class ReplicaClient:
    """Submits requests to one replica and hands their news to whoever reads them. For one event loop.

    Args:
        address: endpoint of the scheduler's ROUTER.
        replica_id: how errors name the replica.
        patience_s: a replica that says nothing for this long has failed. A step may take as long as the
            scheduler's step_timeout_s, and the scheduler may be silent meanwhile.
        heartbeat_s: how often it is asked for its status.
        keys: that it takes to speak to the replica over a network; None: the address is ipc.

    Attributes:
        latest: the status that came last; None before the first.
    """

    def __init__(
        self,
        address: str,
        replica_id: str,
        *,
        patience_s: float = 65.0,
        heartbeat_s: float = HEARTBEAT_S,
        keys: CurveKeys | None = None,
    ) -> None:
        self._address = address
        self.replica_id = replica_id
        self._patience_s = patience_s
        self._heartbeat_s = heartbeat_s
        self._keys = keys
        self._running: dict[int, Receiver] = {}  # handle |-> who is told, while the answer runs
        self._next_handle = 1
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[ReplicaStatus]] = {}
        # Who waits for the next status, whoever asked for it.
        self._listening: set[asyncio.Future[ReplicaStatus]] = set()
        self._problem = f"replica {replica_id} has not answered yet"
        self._failed, self._failure = asyncio.Event(), ""
        self._is_gone = False
        self._is_well, self._is_unwell = asyncio.Event(), asyncio.Event()
        self._heard_at = time.monotonic()
        self.latest: ReplicaStatus | None = None
        self._listeners: list[Listener] = []
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def problem(self) -> str:
        """Why the replica cannot be relied on now; empty when it answers and is well."""
        return self._problem

    @property
    def has_failed(self) -> bool:
        """It takes no requests, until it says that it is well after all; for ever once its owner knows it gone."""
        return self._failed.is_set()

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
        connect(self._socket, self._address, self._keys)
        self._heard_at = time.monotonic()
        self._tasks = [
            run_in_background(self._receive(), f"hearing {self.replica_id}", self._note_fault),
            run_in_background(self._keep_asking(), f"asking {self.replica_id}", self._note_fault),
        ]

    async def close(self, reason: str = "its client was closed") -> None:
        """Ends what still runs, with the reason, and closes the connection. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._socket is not None:
            for handle in self._running:
                self.send(Abort(handle))
            linger_ms = _LINGER_MS if self._running else 0
            self._fail_all(reason)
            socket, self._socket = self._socket, None
            self._end_queries()
            socket.close(linger=linger_ms)
            # Blocks until they have left.
            await asyncio.to_thread(self._context.term)

    def submit(self, request: Request) -> RunningRequest:
        """Hands the request to the replica. Raises ReplicaUnavailable where that is known to have failed."""
        return self.place(request, lambda handles: RunningRequest(self, handles))

    def place(self, request: Request, make_receiver: Callable[[range], ReceiverT]) -> ReceiverT:
        """Hands the request to the replica, and its news to the receiver that is made for its answers' handles.

        Raises:
            ReplicaUnavailable: the replica is known to have failed.
        """
        if self._failed.is_set():
            raise ReplicaUnavailable(self._problem)
        self._check_can_answer()
        handles = self._take_handles(request.sampling.num_sequences)
        receiver = make_receiver(handles)
        self._running |= dict.fromkeys(handles, receiver)
        self.send(request.submit(handles.start))
        return receiver

    def stop(self, handle: int) -> None:
        """Ends an answer in which a stop string was found; its Finish comes."""
        self.send(Stop(handle))

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
            ReplicaUnavailable: no answer in time, or there will be none.
        """
        self._check_can_answer()
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
        """The owner knows that the replica is gone: ends every request with ReplicaUnavailable, and takes no others.

        A status that it sent before may come only now; nothing takes the failure back.
        """
        self._is_gone = True
        self._lose(reason)
        self._end_queries()

    def watch(self, failure: Future[QuireError | None]) -> None:
        """Fails as soon as the future ends, in whichever thread: with an error, or None for a replica that closed.

        Where the future is cancelled, nobody knows of the replica's end any more but by its silence.
        """
        loop = asyncio.get_running_loop()

        def tell(ended: Future[QuireError | None]) -> None:
            if ended.cancelled():
                return
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(self.fail, str(ended.result() or "it was closed"))

        failure.add_done_callback(tell)

    def listen(self, listener: Listener) -> None:
        """Has every status and cache report that comes told."""
        self._listeners.append(listener)

    async def next_status(self, timeout_s: float) -> ReplicaStatus:
        """The next status that comes by itself. Raises ReplicaUnavailable where none does in time, or none will."""
        self._check_can_answer()
        heard: asyncio.Future[ReplicaStatus] = asyncio.get_running_loop().create_future()
        self._listening.add(heard)
        try:
            async with asyncio.timeout(timeout_s):
                return await heard
        except TimeoutError:
            raise ReplicaUnavailable(f"replica {self.replica_id} said nothing for {timeout_s:g} s") from None
        finally:
            self._listening.discard(heard)

    async def wait_until_failed(self) -> str:
        """Returns why the replica failed, once it has; it may say meanwhile that it is well after all."""
        await self._failed.wait()
        return self._failure

    async def wait_until(self, *, well: bool) -> None:
        """Returns once the replica answers without a problem, or (`well` false) once it has one."""
        await (self._is_well if well else self._is_unwell).wait()

    @property
    def _why_mute(self) -> str:
        """Why nothing can come from the replica any more; empty where something can."""
        if self._socket is None:
            return f"the client of replica {self.replica_id} is closed"
        return self._problem if self._is_gone else ""

    def _check_can_answer(self) -> None:
        if why := self._why_mute:
            raise ReplicaUnavailable(why)

    def _end_queries(self) -> None:
        """Nobody waits for what cannot come."""
        for waiting in (*self._queries.values(), *self._listening):
            if not waiting.done():
                waiting.set_exception(ReplicaUnavailable(self._why_mute))

    def _note_fault(self, error: BaseException) -> None:
        """This end of the line is broken: nothing would be heard any more."""
        self.fail(f"the line to it broke: {error!r}")

    def _lose(self, reason: str) -> None:
        self._note_failure(f"replica {self.replica_id} failed: {reason}")
        self._fail_all(reason)

    def _note_failure(self, problem: str) -> None:
        self._failure = problem
        self._failed.set()
        self._set_problem(problem)

    def _fail_all(self, reason: str) -> None:
        receivers, self._running = set(self._running.values()), {}
        for receiver in receivers:
            receiver.fail(ReplicaUnavailable(f"replica {self.replica_id} failed: {reason}"))

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
            if isinstance(message, ReplicaStatus | CacheReport):
                for listener in self._listeners:
                    listener(message)

    def _deliver(self, batch: TokenBatch) -> None:
        for handle, news in updates_by_handle(batch):
            receiver = self._running.get(handle)
            if receiver is None:  # aborted meanwhile
                continue
            if news.finish is not None:
                del self._running[handle]
                self._look_at(news.finish)
            receiver.put(handle, news)

    def _look_at(self, finish: Finish) -> None:
        """A sequence that a broken rank ended tells of it before the next heartbeat does."""
        if finish.reason is FinishReason.ERROR and finish.grpc_status == ReplicaUnavailable.grpc_status:
            self._note_failure(finish.error)

    def _take_status(self, status: ReplicaStatus) -> None:
        if self.latest is not None and status.uptime_s < self.latest.uptime_s:
            self._fail_all("it was restarted and knows nothing of earlier requests")
        self.latest = status
        if not self._is_gone:
            self._failed.clear()
            self._set_problem(status.problem)
        query = self._queries.get(status.query_id)
        for waiting in (*self._listening, *([] if query is None else [query])):
            if not waiting.done():
                waiting.set_result(status)

    async def _keep_asking(self) -> None:
        """The heartbeat: asks for the status at intervals, and fails a replica that stays silent."""
        while True:
            self.send(StatusQuery(next(self._query_ids)))
            await asyncio.sleep(self._heartbeat_s)
            silence_s = time.monotonic() - self._heard_at
            if silence_s > self._patience_s:
                self._lose(f"it has been silent for {silence_s:.0f} s")
