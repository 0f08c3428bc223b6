"""A server that is stopped or killed under load leaves nothing behind; see test_recovery.py for its parts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil
import pytest
from deadlines import READY_TIMEOUT_S

from quire import Client, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.text.requests.outputs import CompletionDelta
from quire.proto.errors import QuireError, ReplicaUnavailable

pytestmark = pytest.mark.cluster

Serve = Callable[..., ServerProcess]
NUM_STREAMS = 4
END_TIMEOUT_S = READY_TIMEOUT_S


@dataclass
class Follower:
    """A thread that reads long streams, one after the other, until one fails with `error`."""

    client: Client
    is_running: threading.Event = field(default_factory=threading.Event)
    error: QuireError | None = None
    ended_at: float | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        params = SamplingParams(max_tokens=1000, ignore_eos=True, seed=1)
        try:
            while True:  # a stream may end just before the fault; then the next one fails
                for event in self.client.generate_stream("It was", params):
                    if isinstance(event, CompletionDelta):
                        self.is_running.set()
        except QuireError as error:
            self.error = error
        self.ended_at = time.monotonic()

    def join(self) -> None:
        self.thread.join(END_TIMEOUT_S)
        assert not self.thread.is_alive(), "the stream did not end"


@pytest.fixture
def follow() -> Iterator[Callable[[ServerProcess], list[Follower]]]:
    """`follow(server) -> followers` whose streams have all begun."""
    clients: list[Client] = []

    def start(server: ServerProcess) -> list[Follower]:
        clients.append(Client(server.address))
        followers = [Follower(clients[-1]) for _ in range(NUM_STREAMS)]
        assert all(follower.is_running.wait(END_TIMEOUT_S) for follower in followers)
        return followers

    yield start
    for client in clients:
        client.close()


def test_sigterm_to_the_process_group_under_load_shuts_down_cleanly(
    serve: Serve, follow: Callable[..., list[Follower]]
) -> None:
    """As systemd and `timeout` send it: Ray's processes must not end before the server has stopped them."""
    server = serve("demo", "--tensor-parallel-size", "2")
    followers = follow(server)
    assert server.stop(to_group=True) == 0, server.log
    for follower in followers:
        follower.join()
        assert isinstance(follower.error, QuireError)
    assert "Traceback" not in server.log
    assert server.leftovers() == []


def test_sigkill_of_the_server_leaves_nothing(serve: Serve, follow: Callable[..., list[Follower]]) -> None:
    server = serve("demo", "--tensor-parallel-size", "2")
    followers = follow(server)
    server.process.kill()
    server.process.wait()
    for follower in followers:
        follower.join()
        assert isinstance(follower.error, ReplicaUnavailable)
    assert server.leftovers() == []


@pytest.mark.slow
def test_death_of_the_raylet_is_named_and_ends_no_stream(
    serve: Serve, follow: Callable[..., list[Follower]]
) -> None:
    server = serve("demo", "--tensor-parallel-size", "2")
    (raylet,) = [each for each in psutil.Process(server.process.pid).children() if each.name() == "raylet"]
    followers = follow(server)
    raylet.kill()
    named = f"(raylet pid {raylet.pid})"
    with Client(server.address) as client:
        until(lambda: all(named in rank.stage for replica in client.status() for rank in replica.ranks))
        until(
            lambda: f"goes on without its Ray node {named}, which died" in server.log
        )  # Ray has reported it
        for follower in followers:
            follower.is_running.clear()
        for follower in followers:
            assert follower.is_running.wait(END_TIMEOUT_S), "the stream does not go on"
        (replica,) = client.status()
        assert replica.num_recoveries == 0
        assert [follower.error for follower in followers] == [None] * len(followers)
        os.kill(replica.ranks[1].pid, signal.SIGKILL)
    for follower in followers:
        follower.join()
        assert "replaced" in str(follower.error)
        assert named in str(follower.error)
    server.process.wait(END_TIMEOUT_S)
    assert server.process.returncode == 1
    assert "no rank can be replaced" in server.log
    assert "Traceback" not in server.log
    assert server.leftovers() == []


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met"
        time.sleep(0.1)
