"""A killed or hanging process is named within a deadline, and the server leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from quire import Client, SamplingParams
from quire.cluster.demo.server import ServerProcess
from quire.cluster.requests.outputs import CompletionDelta
from quire.proto.errors import QuireError, ReplicaUnavailable

pytestmark = pytest.mark.cluster

Serve = Callable[..., ServerProcess]
NUM_STREAMS = 4
END_TIMEOUT_S = 90.0
# Most that a stream may take to end after its rank, on a busy machine; the deadline of a step itself is 60 s.
PROMPT_S = 30.0


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


def rank_pid(server: ServerProcess, rank: int) -> int:
    with Client(server.address) as client:
        (replica,) = client.status()
    return replica.ranks[rank].pid


def assert_streams_ended(followers: list[Follower], since: float, word: str) -> None:
    for follower in followers:
        follower.join()
        assert isinstance(follower.error, ReplicaUnavailable), follower.error
        assert word in str(follower.error)
        assert follower.ended_at is not None
        assert follower.ended_at - since < PROMPT_S


def assert_server_failed(server: ServerProcess, *words: str) -> None:
    assert server.process.wait(END_TIMEOUT_S) == 1
    last_line = server.log.strip().rpartition("\n")[2]
    assert last_line.startswith("quire: ")
    assert all(word in last_line for word in words), last_line
    assert "Traceback" not in server.log
    assert server.leftovers() == []


def test_killed_rank_is_named(serve: Serve, follow: Callable[..., list[Follower]]) -> None:
    server = serve("demo", "--tensor-parallel-size", "2")
    followers = follow(server)
    pid = rank_pid(server, 1)
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert_streams_ended(followers, killed_at, "rank 1 failed at step")
    assert_server_failed(server, "rank 1 failed", "its process died")


@pytest.mark.slow  # test_channel_group.py has the same with one Ray cluster for all tests
def test_rank_killed_while_idle_is_named(serve: Serve) -> None:
    server = serve("demo", "--tensor-parallel-size", "2")
    os.kill(rank_pid(server, 0), signal.SIGKILL)
    assert_server_failed(server, "rank 0 failed: its process died")


def test_killed_scheduler_ends_every_stream(
    serve: Serve, follow: Callable[..., list[Follower]], scheduler_pid: Callable[[ServerProcess], int]
) -> None:
    server = serve("demo", "--tensor-parallel-size", "2")
    followers = follow(server)
    pid = scheduler_pid(server)
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert_streams_ended(followers, killed_at, "scheduler")
    assert_server_failed(server, "the scheduler of replica", "its process died")


@pytest.mark.slow  # as above
def test_stopped_rank_is_named_at_the_step_deadline(
    serve: Serve, follow: Callable[..., list[Follower]]
) -> None:
    server = serve("demo", "--tensor-parallel-size", "2", "--step-timeout-s", "3")
    followers = follow(server)
    pid = rank_pid(server, 1)
    stopped_at = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    assert_streams_ended(followers, stopped_at, "rank 1 failed")
    assert_server_failed(server, "rank 1 failed at step", "does not answer")


def test_sigterm_under_load_shuts_down_cleanly(serve: Serve, follow: Callable[..., list[Follower]]) -> None:
    server = serve("demo", "--tensor-parallel-size", "2")
    followers = follow(server)
    assert server.stop() == 0, server.log
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
