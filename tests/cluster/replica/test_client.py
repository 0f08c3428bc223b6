"""A replica's client once nothing can come from the replica any more."""

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
    """The other end of the line, which says only what the test wants."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(endpoint)

    async def say(self, frame: bytes) -> None:
        """To whoever asks first."""
        gateway, _ = await self._socket.recv_multipart()
        await self._socket.send_multipart([gateway, frame])

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def line() -> AsyncIterator[tuple[ReplicaClient, Scheduler]]:
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


def ends_of(client: ReplicaClient) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
    """What one may wait for from a replica."""
    return [lambda: client.status(LONG_S), lambda: client.next_status(LONG_S)]


@pytest.mark.parametrize("how", ["it fails", "it is closed"])
def test_nobody_waits_for_a_replica_that_is_gone(how: str) -> None:
    async def scenario() -> None:
        async with line() as (client, _):
            waiting = [asyncio.ensure_future(begin()) for begin in ends_of(client)]
            await asyncio.sleep(0)
            if how == "it fails":
                client.fail("rank 0 was killed")
                why = "replica-0 failed: rank 0 was killed"
            else:
                await client.close()
                why = "the client of replica replica-0 is closed"
            for each in waiting:
                with pytest.raises(ReplicaUnavailable, match=why):
                    await each
            for begin in ends_of(client):
                with pytest.raises(ReplicaUnavailable, match=why):
                    await begin()

    run(scenario)


def test_what_cannot_be_read_is_passed_over() -> None:
    async def scenario() -> None:
        async with line() as (client, scheduler):
            heard: asyncio.Queue[object] = asyncio.Queue()
            client.add_listener(heard.put_nowait)
            await scheduler.say(b"\xc1 not a message")
            await scheduler.say(encode(CacheReport(1, 0, b"", b"")))
            assert isinstance(await heard.get(), CacheReport)
            assert not client.has_failed

    run(scenario)


def test_a_fault_of_ours_in_hearing_a_replica_is_told_and_ends_what_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stumble(message: object) -> None:
        raise KeyError("a fault")

    async def scenario() -> None:
        async with line() as (client, scheduler):
            client.add_listener(stumble)
            waiting = asyncio.ensure_future(client.next_status(LONG_S))
            await scheduler.say(encode(CacheReport(1, 0, b"", b"")))
            assert "its connection broke: KeyError('a fault')" in await client.wait_until_failed()
            with pytest.raises(ReplicaUnavailable, match="its connection broke"):
                await waiting

    run(scenario)
    assert "receiving from replica-0 has failed" in caplog.text
