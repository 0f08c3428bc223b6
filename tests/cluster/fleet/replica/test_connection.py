"""ZmqConnection: what many connections of a process share."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq

from quire.cluster.fleet.replica.connection import ZmqConnection


def threads() -> set[str]:
    """Return the ids of this process's threads, those of ZeroMQ included."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


async def test_connections_share_the_threads_of_one_context(tmp_path: Path) -> None:
    connections = [ZmqConnection(f"ipc://{tmp_path}/{number}") for number in range(400)]
    before = threads()
    connections[0].open()
    with_one = threads()
    for connection in connections[1:]:
        connection.open()
    assert threads() <= with_one  # a thread of an earlier test may have ended
    await asyncio.gather(*(connection.close(0) for connection in connections))
    assert not threads() & (with_one - before)


async def test_what_was_sent_leaves_although_another_connection_stays_open(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/replica")
        staying, ending = (ZmqConnection(f"ipc://{tmp_path}/replica") for _ in range(2))
        staying.open()
        ending.open()
        ending.send(b"abort")
        await ending.close(10_000)
        assert await asyncio.to_thread(router.poll, 60_000)
        assert router.recv_multipart()[1] == b"abort"
        await staying.close(0)
