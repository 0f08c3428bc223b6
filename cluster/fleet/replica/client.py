"""ReplicaClient: connection of an asyncio process to one replica's scheduler."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from ....proto.block_map import BlockMap
from ....proto.codec import NO_INTS
from ....proto.engine_command import EngineCommand
from ....proto.errors import (
    InvalidRequest,
    LoraLoadError,
    ProtocolError,
    QuireError,
    ReplicaUnavailable,
)
from ....proto.kv_transfer import KvOffer
from ....proto.lora import LoraReference
from ....proto.media import MediaTensors
from ....proto.replica_status import Activity, ReplicaStatus
from ....proto.stream import (
    Abort,
    BlockMapQuery,
    CacheReport,
    ControlEngine,
    EngineControlled,
    Finish,
    FinishReason,
    GatewayMessage,
    LoadLora,
    LoraLoaded,
    MediaWanted,
    Recall,
    Recalled,
    RecalledOutput,
    ReplicaMessage,
    StatusQuery,
    Stop,
    TokenBatch,
    decode,
    encode,
    media_uploads,
)
from ....proto.transport.network import CurveKeys
from ...os_utils.event_loop import run_in_background
from ...text.requests.request import Request
from ...text.requests.sequence_update import SequenceUpdate, UpdateQueue, updates_by_handle
from .connection import Connection, ZmqConnection

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# Heartbeats after which a replica is queried that has nothing to do, if it reports changes by itself.
QUIET_HEARTBEATS = 10
# For a client that follows the load alone. A scheduler that hangs without work is found sooner by gateways' canaries.
QUIET_LOAD_HEARTBEATS = 30
# Of many gateways each waits for two rounds of a replica's reports before it asks: the replica's messages do not grow
# with the gateways then.
ROUNDS_OF_QUIET = 2
# Such times for which the replica is asked to report changes, and after which it is asked again.
_WATCH_TIMES, _RENEWAL_TIMES = 4, 3
# Longest time that reading a backlog keeps the streams from running. In it, 100 messages of 1,024 tokens are read,
# which is more than arrive while 1,024 streams are written.
MAX_TURN_S = 0.005
# A silent replica has failed after the deadline of a step and this margin, in which its scheduler asks the ranks for
# the stages they are in.
SILENCE_MARGIN_S = 10.0
# A replica answers status queries at any time, and is asked at once when it gets a request. One that has not answered
# for this long is not healthy, though its requests may still continue.
UNANSWERED_S = 3.0
# For aborts to be sent when a client is closed.
_LINGER_MS = 200
_MAX_HANDLE = (1 << 31) - 1  # handles travel as int32

ReceiverT = TypeVar("ReceiverT", bound="UpdateReceiver")
Listener = Callable[[ReplicaStatus | CacheReport], None]


class UpdateReceiver(Protocol):
    """Receives a replica's updates for one submitted request."""

    def put(self, handle: int, update: SequenceUpdate) -> None: ...

    def fail(self, error: QuireError) -> None:
        """Take the error that ends all updates."""
        ...


class SubmittedRequest(UpdateQueue):
    """A request submitted to one replica; it fails if the replica does.

    Args:
        handles: one per output, by index.
        wakes_at_ends: the same as for UpdateQueue.
    """

    def __init__(self, client: ReplicaClient, handles: range, *, wakes_at_ends: bool = False) -> None:
        super().__init__(len(handles), wakes_at_ends=wakes_at_ends)
        self.handles = handles
        self._client = client
        self._stopped: set[int] = set()

    def stop(self, index: int) -> None:
        if index in self.open and index not in self._stopped:
            self._client.stop(self.handles[index])
        self._stopped.add(index)

    def abort(self) -> None:
        self._client.abort(self.handles)
        self.open.clear()

    def end(self, error: QuireError) -> None:
        self.abort()
        self.fail(error)

    def put(self, handle: int, update: SequenceUpdate) -> None:
        self.add(handle - self.handles.start, update)


class _Borrower:
    """Receives what a replica lends."""

    def __init__(self, handles: range) -> None:
        self.handles = handles
        self.offer: asyncio.Future[KvOffer | None] = asyncio.get_running_loop().create_future()

    def put(self, handle: int, update: SequenceUpdate) -> None:
        if not self.offer.done():
            self.offer.set_result(update.lent)

    def fail(self, error: QuireError) -> None:
        if not self.offer.done():
            self.offer.set_result(None)


class ReplicaClient:
    """Submits requests to one replica and passes their updates to receivers. For one event loop.

    Args:
        address: endpoint of the scheduler's ROUTER.
        replica_id: the replica's name in errors.
        silence_timeout_s: a replica that sends no message for this long has failed. Must exceed the scheduler's
            step_timeout_s, as the scheduler may be silent during a step.
        heartbeat_s: seconds between status queries, while the replica has work or does not report changes.
        load_only: this client sends no requests beside a canary, and is not told of other clients' canaries.
        keys: CURVE keys of a tcp address; None for an ipc address.
        connection: None for one over ZeroMQ.

    Attributes:
        address: see above.
        latest_status: None before the first status.
        proved_at: monotonic time of the latest step whose result came through all ranks, of any gateway's request,
            as far as it is known; minus infinity before the first.
    """

    def __init__(
        self,
        address: str,
        replica_id: str,
        *,
        silence_timeout_s: float = 65.0,
        heartbeat_s: float = HEARTBEAT_S,
        load_only: bool = False,
        keys: CurveKeys | None = None,
        connection: Connection | None = None,
    ) -> None:
        self.address, self.replica_id = address, replica_id
        self.silence_timeout_s = silence_timeout_s
        self._heartbeat_s, self._load_only = heartbeat_s, load_only
        self._connection: Connection = connection or ZmqConnection(address, keys)
        self._is_open = False
        self._running: dict[int, UpdateReceiver] = {}  # handle |-> receiver, while the sequence runs
        self._media: dict[int, Mapping[bytes, MediaTensors]] = {}  # handle |-> the images of its request
        self._uploads: dict[bytes, asyncio.Task[None]] = {}  # digest |-> the upload that is under way
        self._next_handle = 1
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[Any]] = {}  # query |-> its reply
        # Futures of `next_status`, done by the next status whichever query it answers.
        self._next_statuses: dict[asyncio.Future[ReplicaStatus], None] = {}
        self._problem = f"replica {replica_id} has not answered yet"
        self._is_unanswered = False  # its silence was logged, and no status came since
        self._failed, self._failure = asyncio.Event(), ""
        self._is_gone = False  # failed for good
        self._healthy, self._unhealthy = asyncio.Event(), asyncio.Event()
        self._received_at = time.monotonic()  # the latest message
        self._status_at = self._asked_at = -math.inf  # the latest status, and the latest query for one
        # Since when a message of the replica is due: the latest message, or what asks for one. None while nothing is.
        self._due_since: float | None = self._received_at
        self._message_is_due = asyncio.Event()
        self.latest_status: ReplicaStatus | None = None
        self.proved_at = -math.inf
        self._listeners: list[Listener] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def problem(self) -> str:
        """Reason why the replica is unhealthy; empty while it answers and reports no problem."""
        return self._problem

    @property
    def has_failed(self) -> bool:
        """True while the replica takes no requests: until its next healthy status, or forever after `fail`."""
        return self._failed.is_set()

    @property
    def silence_s(self) -> float:
        """Time since the latest message of the replica, or since one is due after it."""
        return 0.0 if self._due_since is None else time.monotonic() - self._due_since

    @property
    def status_age_s(self) -> float:
        """Time since the latest status; infinite before the first."""
        return time.monotonic() - self._status_at

    @property
    def is_silent(self) -> bool:
        """True if the replica has sent no message for so long that it counts as failed."""
        return self.silence_s > self.silence_timeout_s

    @property
    def num_running(self) -> int:
        """Number of submitted sequences that have not ended."""
        return len(self._running)

    def start(self) -> None:
        """Connect. Call it in the event loop that uses the client."""
        self._connection.open()
        self._is_open = True
        self._received_at = self._due_since = time.monotonic()
        self._tasks = [
            run_in_background(self._receive(), f"receiving from {self.replica_id}", self._on_task_failed),
            run_in_background(self._send_heartbeats(), f"querying {self.replica_id}", self._on_task_failed),
            run_in_background(self._watch_connection(), f"watching {self.replica_id}", self._on_task_failed),
        ]

    async def close(self, reason: str = "its client was closed", linger_ms: int = 0) -> None:
        """Fail running requests with the reason and close the connection. Safe to call twice.

        Args:
            linger_ms: time for what was sent to leave, at least.
        """
        tasks = [*self._tasks, *self._uploads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks, self._uploads = [], {}
        if self._is_open:
            for handle in self._running:
                self.send(Abort(handle))
            linger_ms = max(linger_ms, _LINGER_MS if self._running else 0)
            self._fail_all(reason)
            self._is_open = False
            self._fail_queries()
            await self._connection.close(linger_ms)

    def submit(self, request: Request, *, wakes_at_ends: bool = False) -> SubmittedRequest:
        """Send the request to the replica; raise ReplicaUnavailable if the replica has failed.

        Args:
            wakes_at_ends: the same as for UpdateQueue.
        """
        return self.submit_with(
            request, lambda handles: SubmittedRequest(self, handles, wakes_at_ends=wakes_at_ends)
        )

    def submit_with(self, request: Request, make_receiver: Callable[[range], ReceiverT]) -> ReceiverT:
        """Send the request to the replica.

        Args:
            make_receiver: called with the handles of the request's outputs; makes the receiver of their updates.

        Raises:
            ReplicaUnavailable: the replica has failed.
        """
        if self._failed.is_set():
            raise ReplicaUnavailable(self._problem)
        self._check_open()
        handles = self._new_handles(request.sampling.num_sequences)
        receiver = make_receiver(handles)
        self._running |= dict.fromkeys(handles, receiver)
        if request.media_tensors:
            self._media |= dict.fromkeys(handles, request.media_tensors)
        self._expect_message()
        self.send(request.submit_message(handles.start))
        return receiver

    def fetch(self, request: Request, handle: int | None = None) -> int:
        """Have the replica read the blocks of a request that it will get; `fetch_only` is set. No answer follows.

        Args:
            handle: of an earlier fetch of the same request, which the replica has the prompt of; None for the first.

        Returns:
            the handle for later fetches.
        """
        if handle is None:
            handle = self._new_handles(1).start
        else:
            request = replace(request, prompt_token_ids=NO_INTS)
        self.send(request.submit_message(handle))
        return handle

    async def lend(self, request: Request, timeout_s: float) -> KvOffer | None:
        """Have the replica lend the blocks of a prompt that it has cached; None if it lends none, or not in time."""
        with suppress(ReplicaUnavailable, TimeoutError):
            borrower = self.submit_with(replace(request, lend_only=True), _Borrower)
            try:
                async with asyncio.timeout(timeout_s):
                    return await borrower.offer
            finally:
                self.abort(borrower.handles)
        return None

    def stop(self, handle: int) -> None:
        """End a sequence in which a stop string was found; the scheduler sends its Finish."""
        self.send(Stop(handle))

    def _new_handles(self, count: int) -> range:
        if self._next_handle + count > _MAX_HANDLE:
            self._next_handle = 1
        self._next_handle += count
        return range(self._next_handle - count, self._next_handle)

    def abort(self, handles: range) -> None:
        """Abort the sequences that still run, and drop all further updates for these handles."""
        for handle in handles:
            self._media.pop(handle, None)
            if self._running.pop(handle, None) is not None:
                self.send(Abort(handle))

    async def status(self, timeout_s: float) -> ReplicaStatus:
        """Query the replica's status.

        Raises:
            ReplicaUnavailable: the replica does not answer in time, or has failed.
        """
        query_id = next(self._query_ids)
        return cast(ReplicaStatus, await self._ask(StatusQuery(query_id), timeout_s))

    async def block_map(self, timeout_s: float) -> BlockMap:
        """Query the states of the replica's KV blocks.

        Raises:
            ReplicaUnavailable: the replica does not answer in time, or has failed.
        """
        query_id = next(self._query_ids)
        return cast(BlockMap, await self._ask(BlockMapQuery(query_id), timeout_s))

    async def recall(self, request: Request, timeout_s: float) -> tuple[RecalledOutput, ...]:
        """Return the tokens that the replica knows of a request, which another gateway may have submitted.

        Raises:
            ReplicaUnavailable: the replica does not answer in time, or has failed.
        """
        reply = cast(Recalled, await self._ask(request.recall_message(next(self._query_ids)), timeout_s))
        return reply.outputs

    async def load_lora(self, reference: LoraReference, timeout_s: float) -> None:
        """Have the replica's ranks read an adapter.

        Raises:
            LoraLoadError: a rank cannot read it.
            ReplicaUnavailable: the replica does not answer in time, or has failed.
        """
        query = LoadLora(next(self._query_ids), reference)
        reply = cast(LoraLoaded, await self._ask(query, timeout_s))
        if reply.error:
            raise LoraLoadError(f"replica {self.replica_id}: {reply.error}")

    def register_lora(self, reference: LoraReference) -> None:
        """Have the replica load an adapter, or unload it if it has no path, without waiting."""
        self.send(LoadLora(0, reference))

    async def control(self, command: EngineCommand, timeout_s: float) -> None:
        """Have the replica carry out a command.

        Raises:
            InvalidRequest: it cannot; its state is unchanged.
            ReplicaUnavailable: the replica does not answer in time, or has failed.
        """
        query = ControlEngine(next(self._query_ids), command)
        reply = cast(EngineControlled, await self._ask(query, timeout_s))
        if reply.error:
            raise InvalidRequest("command", reply.error)

    async def _ask(
        self, query: StatusQuery | BlockMapQuery | LoadLora | ControlEngine | Recall, timeout_s: float
    ) -> Any:
        """Send a query and return its reply."""
        self._check_open()
        reply = self._queries[query.query_id] = asyncio.get_running_loop().create_future()
        self._expect_message()
        try:
            self.send(query)
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            kinds = {
                LoadLora: "the load of an adapter",
                ControlEngine: "a command",
                Recall: "a query for a request's tokens",
            }
            kind = kinds.get(type(query), "a status query")
            reason = f"replica {self.replica_id} did not answer {kind} in {timeout_s:g} s"
            raise ReplicaUnavailable(reason) from None
        finally:
            del self._queries[query.query_id]

    def fail(self, reason: str) -> None:
        """Fail the replica for good, as its owner knows that it is gone: every request ends with ReplicaUnavailable.

        A status that the replica sent before, and that arrives later, does not undo the failure.
        """
        self._is_gone = True
        self._fail_replica(reason)
        self._fail_queries()

    def release(self, reason: str) -> None:
        """Abort what runs at the replica and end it with ReplicaUnavailable, so that other replicas continue it."""
        for handle in self._running:
            self.send(Abort(handle))
        self._fail_all(reason)

    def fail_after(self, failure: Future[QuireError | None]) -> None:
        """Call `fail` when the future is done, in any thread: with its error, or None for a replica that was closed.

        After a cancellation of the future, only the silence timeout detects the replica's end.
        """
        loop = asyncio.get_running_loop()

        def on_done(done: Future[QuireError | None]) -> None:
            if done.cancelled():
                return
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.fail, str(done.result() or "it was closed"))

        failure.add_done_callback(on_done)

    def add_listener(self, listener: Listener) -> None:
        """Call the listener with every status and cache report that arrives."""
        self._listeners.append(listener)

    async def next_status(self, timeout_s: float) -> ReplicaStatus:
        """Return the next status that arrives.

        Raises:
            ReplicaUnavailable: no status arrives in time, or the replica has failed.
        """
        self._check_open()
        arrival: asyncio.Future[ReplicaStatus] = asyncio.get_running_loop().create_future()
        self._next_statuses[arrival] = None
        self._expect_message()
        try:
            async with asyncio.timeout(timeout_s):
                return await arrival
        except TimeoutError:
            raise ReplicaUnavailable(f"replica {self.replica_id} sent no status in {timeout_s:g} s") from None
        finally:
            self._next_statuses.pop(arrival, None)

    async def wait_until_failed(self) -> str:
        """Wait until the replica fails and return the reason, even if the replica is healthy again by then."""
        await self._failed.wait()
        return self._failure

    async def wait_until_healthy(self) -> None:
        """Wait until the replica answers and reports no problem."""
        await self._healthy.wait()

    async def wait_until_unhealthy(self) -> None:
        """Wait until the replica has failed or reports a problem."""
        await self._unhealthy.wait()

    @property
    def _closed_reason(self) -> str:
        """Reason why no message can arrive any more; empty if one can."""
        if not self._is_open:
            return f"the client of replica {self.replica_id} is closed"
        return self._problem if self._is_gone else ""

    def _check_open(self) -> None:
        if reason := self._closed_reason:
            raise ReplicaUnavailable(reason)

    def _fail_queries(self) -> None:
        for waiting in (*self._queries.values(), *self._next_statuses):
            if not waiting.done():
                waiting.set_exception(ReplicaUnavailable(self._closed_reason))

    def _on_task_failed(self, error: BaseException) -> None:
        """Fail the replica after a bug of this client: no message would be received any more."""
        self.fail(f"its connection broke: {error!r}")

    def _fail_replica(self, reason: str) -> None:
        self._set_failed(f"replica {self.replica_id} failed: {reason}")
        self._fail_all(reason)

    def _set_failed(self, problem: str) -> None:
        self._failure = problem
        self._failed.set()
        self._set_problem(problem)

    def _fail_all(self, reason: str) -> None:
        receivers, self._running = dict.fromkeys(self._running.values()), {}  # each once, in order
        self._media = {}
        for receiver in receivers:
            receiver.fail(ReplicaUnavailable(f"replica {self.replica_id} failed: {reason}"))

    def _set_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            _log.warning("%s", problem)
        self._replace_problem(problem)

    def _set_silent(self) -> None:
        """Name the silence, which grows. Only its beginning is logged: the log takes few alike per minute."""
        problem = f"replica {self.replica_id} has not answered for {self.silence_s:.0f} s"
        if not self._is_unanswered:
            _log.warning("%s", problem)
        self._is_unanswered = True
        self._replace_problem(problem)

    def _replace_problem(self, problem: str) -> None:
        self._problem = problem
        became, ended = (self._unhealthy, self._healthy) if problem else (self._healthy, self._unhealthy)
        became.set()
        ended.clear()

    def send(self, message: GatewayMessage) -> None:
        """Send without blocking; does nothing once the client is closed."""
        if self._is_open:
            self._connection.send(encode(message))

    async def _receive(self) -> None:
        """Pass on messages until canceled; the updates of those that have arrived are merged."""
        while True:
            batches: list[TokenBatch] = []
            for frame in self._arrived(await self._connection.receive()):
                message = self._decoded(frame)
                if isinstance(message, TokenBatch):
                    batches.append(message)
                elif message is not None:
                    self._deliver(batches)
                    batches = []
                    self._on_message(message)
            self._deliver(batches)
            # recv() does not wait while messages are there: without this, a backlog keeps the streams from running.
            await asyncio.sleep(0)

    def _arrived(self, frame: bytes) -> Iterator[bytes]:
        """Yield the frame and those that have arrived after it, for MAX_TURN_S."""
        turn_began_at = self._received_at = time.monotonic()
        if self._due_since is not None:
            self._due_since = turn_began_at
        yield frame
        while time.monotonic() - turn_began_at < MAX_TURN_S:
            arrived = self._connection.receive_arrived()
            if arrived is None:
                return
            yield arrived

    def _decoded(self, frame: bytes) -> GatewayMessage | ReplicaMessage | None:
        """Return the frame's message; None if it is malformed."""
        try:
            return decode(frame)
        except ProtocolError as error:
            _log.error("replica %s: %s", self.replica_id, error)
            return None

    def _on_message(self, message: GatewayMessage | ReplicaMessage) -> None:
        if isinstance(message, ReplicaStatus):
            self._on_status(message)
        elif isinstance(message, BlockMap | LoraLoaded | EngineControlled | Recalled):
            self._resolve(message)
        elif isinstance(message, MediaWanted):
            self._upload_wanted(message)
        if isinstance(message, ReplicaStatus | CacheReport):
            for listener in self._listeners:
                listener(message)

    def _upload_wanted(self, wanted: MediaWanted) -> None:
        """Send the images that a sequence waits for. Unknown ones are those of a sequence that has ended here.

        One that is being sent already is sent again from its beginning: the replica has dropped what it had of it.
        """
        held = self._media.get(wanted.handle, {})
        for digest in wanted.digests:
            if digest in held:
                if (earlier := self._uploads.pop(digest, None)) is not None:
                    earlier.cancel()
                self._uploads[digest] = run_in_background(
                    self._upload(digest, held[digest]), f"sending an image to {self.replica_id}"
                )

    async def _upload(self, digest: bytes, tensors: MediaTensors) -> None:
        """Send an image in pieces, between which the streams of this process run."""
        for piece in media_uploads(digest, tensors):
            self.send(piece)
            await asyncio.sleep(0)
        self._uploads.pop(digest, None)

    def _deliver(self, batches: Sequence[TokenBatch]) -> None:
        if any(len(batch.token_ids) or batch.pooled is not None for batch in batches):
            self.proved_at = self._received_at
        for handle, update in updates_by_handle(*batches):
            receiver = self._running.get(handle)
            if receiver is None:  # aborted after the scheduler sent the update
                continue
            if update.finish is not None:
                del self._running[handle]
                self._media.pop(handle, None)
                self._check_replica_failure(update.finish)
            receiver.put(handle, update)

    def _check_replica_failure(self, finish: Finish) -> None:
        """Mark the replica as failed if the sequence ended with it: this arrives before the next heartbeat."""
        if finish.reason is FinishReason.ERROR and finish.grpc_status == ReplicaUnavailable.grpc_status:
            self._set_failed(finish.error)

    def _on_status(self, status: ReplicaStatus) -> None:
        if self.latest_status is not None and status.uptime_s < self.latest_status.uptime_s:
            self._fail_all("it was restarted and has no earlier requests")
        self.latest_status, self._status_at = status, self._received_at
        self.proved_at = max(self.proved_at, self._received_at - status.last_step_s)
        self._is_unanswered = False
        if not self._is_gone:
            self._failed.clear()
            self._set_problem(status.problem)
        self._resolve(status)
        for waiting in self._next_statuses:
            if not waiting.done():
                waiting.set_result(status)
        if self._is_quiet:
            self._due_since = None
            self._message_is_due.clear()
        else:
            self._expect_message()

    @property
    def _is_quiet(self) -> bool:
        """Return whether the replica owes no message: this client waits for none, and would be told of a change.

        A replica that computes tells the change of its counters each second, unless many gateways take turns.
        """
        status = self.latest_status
        if status is None or not status.reports_changes:
            return False
        waits = any(not each.done() for each in (*self._queries.values(), *self._next_statuses))
        if self._running or waits or self._problem:
            return False
        # With sequences it has just been sent a request: the step comes, and no canary is sent meanwhile.
        is_idle = status.activity is Activity.IDLE and not status.num_running + status.num_waiting
        return is_idle or self._num_rounds > 1

    @property
    def _num_rounds(self) -> int:
        return 1 if self.latest_status is None else self.latest_status.num_report_rounds

    @property
    def crowding(self) -> float:
        """Factor by which the replica may be quiet longer, as many gateways take turns; 1.0 for up to a hundred."""
        return max(1.0, ROUNDS_OF_QUIET * self._num_rounds / QUIET_HEARTBEATS)

    @property
    def _quiet_s(self) -> float:
        num_heartbeats = QUIET_LOAD_HEARTBEATS if self._load_only else QUIET_HEARTBEATS
        return num_heartbeats * self._heartbeat_s * self.crowding

    @property
    def _query_at(self) -> float:
        """Time of the next query of a replica that owes no message."""
        return min(self._status_at + self._quiet_s, self._asked_at + _RENEWAL_TIMES * self._quiet_s)

    @property
    def _is_query_due(self) -> bool:
        """Return whether to query a replica that owes a message. One of many gateways is content with any message."""
        needs_status = self._num_rounds == 1 or bool(self._next_statuses)
        age_s = self.status_age_s if needs_status else self.silence_s
        return age_s > 0.9 * self._heartbeat_s or time.monotonic() >= self._query_at

    def _expect_message(self) -> None:
        """A message of the replica is due from now on."""
        if self._due_since is None:
            self._due_since = time.monotonic()
        self._message_is_due.set()

    def _resolve(self, message: ReplicaStatus | BlockMap | LoraLoaded | EngineControlled | Recalled) -> None:
        """Pass a reply to the caller that waits for it, if it still does."""
        query = self._queries.get(message.query_id)
        if query is not None and not query.done():
            query.set_result(message)

    async def _watch_connection(self) -> None:
        """Fail what runs when the connection is lost: the replica does not know this client by its new connection."""
        while True:
            await self._connection.wait_until_lost()
            self._fail_replica("the connection to it was lost")

    async def _send_heartbeats(self) -> None:
        """Query the status at intervals, and fail a replica that stays silent.

        The time in which this process was stopped, or did not get to its heartbeat, is not the replica's silence:
        messages of the replica may wait in the socket.
        """
        while True:
            if self._is_query_due:
                self._query_status()
            due_at = time.monotonic() + self._heartbeat_s
            await asyncio.sleep(self._heartbeat_s)
            if self._due_since is not None:
                now = time.monotonic()
                self._due_since = min(now, self._due_since + max(0.0, now - due_at))
            if self.is_silent:
                self._fail_replica(f"it has been silent for {self.silence_s:.0f} s")
            elif self.silence_s > UNANSWERED_S and not self.has_failed:
                self._set_silent()
            await self._end_of_quiet()

    def _query_status(self) -> None:
        watch_s = _WATCH_TIMES * self._quiet_s
        self.send(StatusQuery(next(self._query_ids), watch_s, self._load_only))
        self._asked_at = time.monotonic()
        self._expect_message()

    async def _end_of_quiet(self) -> None:
        """Return once a message of the replica is due, or a query."""
        while self._due_since is None:
            if (left_s := self._query_at - time.monotonic()) <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._message_is_due.wait()
