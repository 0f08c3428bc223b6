"""ReplicaClient: waiting calls end when the replica fails, its messages break, or the client is closed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from quire.cluster.replica.client import ReplicaClient
from quire.proto.errors import ReplicaUnavailable
from quire.proto.stream import CacheReport, encode

LONG_S = 600.0


class Scheduler:
    """A scheduler's socket that sends only the frames that a test gives it."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)

    async def send(self, frame: bytes) -> None:
        """Send a frame to the client, after its first query."""
        gateway, _ = await self._socket.recv_multipart()
        await self._socket.send_multipart([gateway, frame])

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[ReplicaClient, Scheduler]]:
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        endpoint = f"ipc://{folder}/replica"
        scheduler = Scheduler(endpoint)
        client = ReplicaClient(endpoint, "replica-0", heartbeat_s=0.05)
        client.start()
        try:
            yield client, scheduler
        finally:
            await client.close()
            scheduler.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def waiting_calls(client: ReplicaClient) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
    """Return every call that waits for a message of the replica."""
    return [lambda: client.status(LONG_S), lambda: client.next_status(LONG_S)]


@pytest.mark.parametrize("end", ["replica fails", "client is closed"])
def test_waiting_calls_fail_once_the_replica_failed_or_the_client_is_closed(end: str) -> None:
    async def scenario() -> None:
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

    run(scenario)


def test_unreadable_message_is_ignored() -> None:
    async def scenario() -> None:
        async with connection() as (client, scheduler):
            received: asyncio.Queue[object] = asyncio.Queue()
            client.add_listener(received.put_nowait)
            await scheduler.send(b"\xc1 not a message")
            await scheduler.send(encode(CacheReport(1, 0, b"", b"")))
            assert isinstance(await received.get(), CacheReport)
            assert not client.has_failed

    run(scenario)


def test_bug_in_a_listener_is_logged_and_fails_waiting_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(message: object) -> None:
        raise KeyError("a fault")

    async def scenario() -> None:
        async with connection() as (client, scheduler):
            client.add_listener(fail)
            waiting = asyncio.ensure_future(client.next_status(LONG_S))
            await scheduler.send(encode(CacheReport(1, 0, b"", b"")))
            assert "its connection broke: KeyError('a fault')" in await client.wait_until_failed()
            with pytest.raises(ReplicaUnavailable, match="its connection broke"):
                await waiting

    run(scenario)
    assert "receiving from replica-0 has failed" in caplog.text
