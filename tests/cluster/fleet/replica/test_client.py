"""ReplicaClient: waiting calls end when the replica fails, its messages break, or the client is closed."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from quire.cluster.fleet.replica import client as module
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.text.requests.request import Request
from quire.cluster.text.requests.sequence_update import SequenceUpdate
from quire.proto.errors import QuireError, ReplicaUnavailable
from quire.proto.replica_status import Activity, ReplicaStatus
from quire.proto.sampling import SamplingParams
from quire.proto.stream import (
    CacheReport,
    GatewayMessage,
    ReplicaMessage,
    StatusQuery,
    TokenBatch,
    decode,
    encode,
)
from quire.scheduler.core.replies.outbox import error_finish

LONG_S = 600.0
HEARTBEAT_S = 0.05


class Scheduler:
    """A scheduler's socket that sends only the frames that a test gives it."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)

    async def send(self, *frames: bytes) -> None:
        """Send frames to the client, after its first message."""
        gateway, _ = await self._socket.recv_multipart()
        for frame in frames:
            await self._socket.send_multipart([gateway, frame])

    async def receive(self) -> None:
        """Wait for a message of the client."""
        await self._socket.recv_multipart()

    def close(self, linger_ms: int = 0) -> None:
        self._context.destroy(linger=linger_ms)


@asynccontextmanager
async def connection(silence_timeout_s: float = 65.0) -> AsyncIterator[tuple[ReplicaClient, Scheduler]]:
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        endpoint = f"ipc://{folder}/replica"
        scheduler = Scheduler(endpoint)
        client = ReplicaClient(
            endpoint, "replica-0", silence_timeout_s=silence_timeout_s, heartbeat_s=HEARTBEAT_S
        )
        client.start()
        try:
            yield client, scheduler
        finally:
            await client.close()
            scheduler.close()


def waiting_calls(client: ReplicaClient) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
    """Return every call that waits for a message of the replica."""
    return [lambda: client.status(LONG_S), lambda: client.next_status(LONG_S)]


@pytest.mark.parametrize("end", ["replica fails", "client is closed"])
async def test_waiting_calls_fail_once_the_replica_failed_or_the_client_is_closed(end: str) -> None:
    async with connection() as (client, _):
        waiting = [asyncio.ensure_future(begin()) for begin in waiting_calls(client)]
        await asyncio.sleep(0)
        if end == "replica fails":
            client.fail("rank 0 was killed")
            reason = "replica-0 failed: rank 0 was killed"
        else:
            await client.close()
            reason = "the client of replica replica-0 is closed"
        for call in waiting:
            with pytest.raises(ReplicaUnavailable, match=reason):
                await call
        for begin in waiting_calls(client):
            with pytest.raises(ReplicaUnavailable, match=reason):
                await begin()


async def test_pause_of_the_gateway_is_not_the_silence_of_its_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    async with connection(silence_timeout_s=10 * HEARTBEAT_S) as (client, scheduler):
        await scheduler.receive()
        clock.now += LONG_S  # as if the process had been stopped between two heartbeats
        for _ in range(3):
            await scheduler.receive()
        assert client.problem == "replica replica-0 has not answered yet"
        while not client.has_failed:  # the test has a deadline
            clock.now += HEARTBEAT_S
            await scheduler.receive()
        assert "it has been silent" in client.problem


async def test_silence_is_logged_once_while_its_length_grows(
    monkeypatch: pytest.MonkeyPatch, log_of: Callable[[str], list[str]]
) -> None:
    clock, logged = SimpleNamespace(now=1000.0), log_of(module.__name__)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(module, "UNANSWERED_S", HEARTBEAT_S)
    async with connection() as (client, scheduler):
        while "has not answered for 1 s" not in client.problem:  # the test has a deadline
            clock.now += HEARTBEAT_S
            await scheduler.receive()
    warnings = [line for line in logged if line.startswith("WARNING")]
    assert warnings == ["WARNING: replica replica-0 has not answered for 0 s"]


class QuietReplica:
    """A connection to a replica that answers status queries, unless it is stopped, and reports changes."""

    def __init__(self) -> None:
        self.sent: list[GatewayMessage | ReplicaMessage] = []
        self.is_stopped = False
        self.status = ReplicaStatus("replica-0", "demo", query_id=0, reports_changes=True, last_step_s=5.0)
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()

    def open(self) -> None: ...

    def send(self, frame: bytes) -> None:
        message = decode(frame)
        self.sent.append(message)
        if isinstance(message, StatusQuery) and not self.is_stopped:
            self.report(query_id=message.query_id)

    def report(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        self._frames.put_nowait(encode(self.status))

    def send_tokens(self, handle: int) -> None:
        tokens = TokenBatch(1, np.array([handle], np.int32), np.array([7], np.int32))
        self._frames.put_nowait(encode(tokens))

    async def receive(self) -> bytes:
        return await self._frames.get()

    def receive_arrived(self) -> bytes | None:
        return None if self._frames.empty() else self._frames.get_nowait()

    async def wait_until_lost(self) -> None:
        await asyncio.sleep(LONG_S)

    async def close(self, linger_ms: int) -> None: ...

    def num_queries(self) -> int:
        return sum(isinstance(message, StatusQuery) for message in self.sent)


@asynccontextmanager
async def quiet_replica() -> AsyncIterator[tuple[ReplicaClient, QuietReplica]]:
    """Yield a client whose replica has answered, and has nothing to do: the next query is due after ten hours."""
    replica = QuietReplica()
    client = ReplicaClient("nowhere", "replica-0", heartbeat_s=3600.0, connection=replica)
    client.start()
    try:
        await client.wait_until_healthy()
        assert client.silence_s == 0
        yield client, replica
    finally:
        await client.close()


def a_request() -> Request:
    return Request("r", np.array([1], np.int32), SamplingParams(max_tokens=9, seed=0))


async def test_replica_without_work_owes_no_message_until_it_gets_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    async with quiet_replica() as (client, replica):
        clock.now += 100.0
        assert client.silence_s == 0
        replica.is_stopped = True
        submitted = client.submit(a_request())
        clock.now += 2.0
        assert client.silence_s == 2.0
        submitted.abort()
        assert client.silence_s == 2.0  # until it answers


@pytest.mark.parametrize("load_only", [False, True])
async def test_quiet_replica_is_asked_rarely_and_at_once_for_a_request(
    monkeypatch: pytest.MonkeyPatch, load_only: bool
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    replica = QuietReplica()
    client = ReplicaClient("nowhere", "replica-0", heartbeat_s=0.001, load_only=load_only, connection=replica)
    client.start()
    await client.wait_until_healthy()
    num_heartbeats = module.QUIET_LOAD_HEARTBEATS if load_only else module.QUIET_HEARTBEATS
    clock.now += 0.9 * num_heartbeats * 0.001
    await asyncio.sleep(0.05)  # many heartbeats of the loop's clock; too few of the client's
    assert replica.num_queries() == 1
    clock.now += 0.1 * num_heartbeats * 0.001
    while client.status_age_s > 0:  # until it is asked and has answered; the test has a deadline
        await asyncio.sleep(0.001)
    assert replica.num_queries() == 2
    replica.is_stopped = True
    clock.now += 0.002
    client.submit(a_request())
    while replica.num_queries() < 3:
        await asyncio.sleep(0.001)
    await client.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"activity": Activity.BUSY},
        {"num_waiting": 1},
        {"problem": "a rank failed"},
        {"reports_changes": False},
    ],
)
async def test_replica_with_work_or_problems_owes_messages(changes: dict[str, Any]) -> None:
    async with quiet_replica() as (client, replica):
        arrival = asyncio.Event()
        client.add_listener(lambda message: arrival.set())
        replica.report(query_id=0, **changes)
        await arrival.wait()
        await asyncio.sleep(0.001)
        assert client.silence_s > 0


async def test_busy_replica_of_many_gateways_owes_no_message_until_it_gets_a_request() -> None:
    async with quiet_replica() as (client, replica):
        arrival = asyncio.Event()
        client.add_listener(lambda message: arrival.set())
        replica.report(query_id=0, activity=Activity.BUSY, num_running=3, num_report_rounds=5)
        await arrival.wait()
        await asyncio.sleep(0.001)
        assert client.silence_s == 0
        client.submit(a_request())
        await asyncio.sleep(0.001)
        assert client.silence_s > 0


async def test_replica_of_many_gateways_is_not_queried_while_it_sends_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    replica = QuietReplica()
    replica.status = replace(replica.status, activity=Activity.BUSY, num_report_rounds=5)
    client = ReplicaClient("nowhere", "replica-0", heartbeat_s=0.001, connection=replica)
    client.start()
    await client.wait_until_healthy()
    submitted = client.submit(a_request())
    for _ in range(4):
        clock.now += 0.0005
        replica.send_tokens(submitted.handles.start)
        while client.silence_s > 0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)  # some heartbeats of the loop's clock
    assert client.status_age_s > 0.0015
    assert replica.num_queries() == 1
    clock.now += 0.001
    while replica.num_queries() < 2:  # it is silent
        await asyncio.sleep(0.001)
    await client.close()


async def test_more_than_a_hundred_gateways_ask_less_often() -> None:
    async with quiet_replica() as (client, replica):
        crowding = []
        for num_rounds in (1, 5, 50):
            reported = asyncio.ensure_future(client.next_status(LONG_S))
            await asyncio.sleep(0)
            replica.report(query_id=0, num_report_rounds=num_rounds)
            await reported
            crowding.append(client.crowding)
        assert crowding == [1.0, 1.0, 10.0]


async def test_step_of_another_gateways_request_proves_the_replica() -> None:
    async with quiet_replica() as (client, replica):
        before = client.proved_at
        assert before > -math.inf
        reported = asyncio.ensure_future(client.next_status(LONG_S))
        await asyncio.sleep(0)
        replica.report(query_id=0, last_step_s=0.0)
        await reported
        assert client.proved_at >= before + 4.9


class Receiver:
    """UpdateReceiver that keeps the updates of one sequence."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.updates: list[list[int]] = []
        self.has_all = asyncio.Event()

    def put(self, handle: int, update: SequenceUpdate) -> None:
        self.updates.append(update.token_ids)
        if sum(map(len, self.updates)) == self._num_tokens:
            self.has_all.set()

    def fail(self, error: QuireError) -> None:
        """See `UpdateReceiver`; the client is closed while the sequence runs."""


class Arrived:
    """A connection on which all frames have arrived that a test puts into it."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.may_receive = asyncio.Event()

    def open(self) -> None: ...

    def send(self, frame: bytes) -> None: ...

    async def receive(self) -> bytes:
        await self.may_receive.wait()
        while not self.frames:
            await asyncio.sleep(LONG_S)
        return self.frames.popleft()

    def receive_arrived(self) -> bytes | None:
        return self.frames.popleft() if self.frames else None

    async def wait_until_lost(self) -> None:
        await asyncio.sleep(LONG_S)

    async def close(self, linger_ms: int) -> None: ...


async def test_updates_of_messages_that_have_arrived_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = 500
    steps = [np.array([step], np.int32) for step in range(num_steps)]
    monkeypatch.setattr(module, "MAX_TURN_S", LONG_S)
    connection, handles = Arrived(), list[range]()
    client = ReplicaClient("nowhere", "replica-0", connection=connection)
    client.start()

    def make_receiver(given: range) -> Receiver:
        handles.append(given)
        return Receiver(num_steps)

    request = Request("r", np.array([1], np.int32), SamplingParams())
    receiver = client.submit_with(request, make_receiver)
    handle = np.array([handles[0].start], np.int32)
    connection.frames.extend(encode(TokenBatch(1, handle, token_id)) for token_id in steps)
    connection.may_receive.set()
    await receiver.has_all.wait()
    assert receiver.updates == [list(range(num_steps))]
    await client.close()


async def test_unreadable_message_is_ignored() -> None:
    async with connection() as (client, scheduler):
        received: asyncio.Queue[object] = asyncio.Queue()
        client.add_listener(received.put_nowait)
        await scheduler.send(b"\xc1 not a message")
        await scheduler.send(encode(CacheReport(1, 0, b"", b"")))
        assert isinstance(await received.get(), CacheReport)
        assert not client.has_failed


async def test_bug_in_a_listener_is_logged_and_fails_waiting_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(message: object) -> None:
        raise KeyError("a fault")

    async with connection() as (client, scheduler):
        client.add_listener(fail)
        waiting = asyncio.ensure_future(client.next_status(LONG_S))
        await scheduler.send(encode(CacheReport(1, 0, b"", b"")))
        assert "its connection broke: KeyError('a fault')" in await client.wait_until_failed()
        with pytest.raises(ReplicaUnavailable, match="its connection broke"):
            await waiting
    assert "receiving from replica-0 has failed" in caplog.text


async def test_lost_connection_fails_running_requests_at_once() -> None:
    """The scheduler does not know the client by its next connection, so it would never end them."""
    async with connection() as (client, scheduler):
        await scheduler.receive()
        request = Request("lost", np.ones(4, np.int32), SamplingParams(max_tokens=9, seed=0))
        submitted = client.submit(request)
        scheduler.close()
        with pytest.raises(ReplicaUnavailable, match="the connection to it was lost"):
            await anext(submitted)
        assert client.has_failed
        assert client.num_running == 0


async def test_last_messages_before_a_lost_connection_are_read() -> None:
    async with connection() as (client, scheduler):
        request = Request("ended", np.ones(4, np.int32), SamplingParams(max_tokens=9, seed=0))
        submitted = client.submit(request)
        end = error_finish(submitted.handles[0], ReplicaUnavailable("rank 1 was killed by SIGKILL"))
        await scheduler.send(encode(TokenBatch(0, finished=(end,))))
        scheduler.close(linger_ms=60_000)
        _, update = await anext(submitted)
        assert update.finish is not None
        assert update.finish.error == "rank 1 was killed by SIGKILL"
