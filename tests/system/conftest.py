"""Fixtures with whole servers: `quire serve` as a child process, reached over gRPC."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from deadlines import COMMAND_TIMEOUT_S, READY_TIMEOUT_S
from example_programs import RunExample, example_runner
from ray_nodes import RayNodes
from server_processes import pid_of

from quire.cluster.cli.demo.server import ServerProcess

Serve = Callable[..., ServerProcess]
RunQuire = Callable[..., "subprocess.CompletedProcess[str]"]


def _start(*arguments: str) -> ServerProcess:
    server = ServerProcess(*arguments)
    try:
        server.wait_ready(READY_TIMEOUT_S)
    except BaseException:
        server.close()
        raise
    return server


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Two ranks of the demo model with 63 usable blocks, audited at each step. Tests must leave it idle."""
    arguments = (
        "demo",
        "--tensor-parallel-size",
        "2",
        "--num-kv-blocks",
        "64",
        "--max-num-seqs",
        "16",
        "--audit",
    )
    started = _start(*arguments)
    yield started
    status = started.stop()
    left = started.leftovers()
    log = started.log
    started.close()
    assert status == 0, log
    assert left == []


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A Ray cluster with room for four replicas of one rank."""
    with RayNodes({"CPU": 8}) as started:
        yield started


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(*arguments) -> ServerProcess`: a ready server for one test."""
    started: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        started.append(_start(*arguments))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def run_example() -> Iterator[RunExample]:
    """`run_example(name, *arguments) -> str`: the output of a program of examples/, in a process that they share."""
    with example_runner() as run:
        yield run


@pytest.fixture
def run_quire() -> RunQuire:
    """`run_quire(*arguments) -> CompletedProcess`: runs the command `quire` to its end."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from quire.cluster.cli import main; main()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)

    return run


@pytest.fixture
def scheduler_pid() -> Callable[[ServerProcess], int]:
    """`scheduler_pid(server) -> int`: the process of its only scheduler."""
    return lambda server: pid_of("SchedulerActor", server.process.pid)
