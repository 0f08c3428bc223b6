"""A model whose layers keep states, served by two ranks: a killed rank or scheduler costs streams only a pause."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deadlines import READY_TIMEOUT_S
from state_kinds import STATE_KINDS

from quire import Client, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.client.wire.status import ReplicaInfo
from quire.cluster.text.requests.outputs import CompletionDelta

pytestmark = pytest.mark.cluster

DEADLINE_S = READY_TIMEOUT_S
PROMPT = "It was the best of times, it was the worst of times"
PARAMS = [
    SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0),
    SamplingParams(max_tokens=200, ignore_eos=True, seed=7, n=3, temperature=0.9),
    SamplingParams(max_tokens=40, beam_width=3, n=2),
]


@pytest.fixture(scope="module")
def server(make_model: Callable[..., Path]) -> Iterator[ServerProcess]:
    folder = make_model("lfm2", seed=7, **STATE_KINDS["lfm2"])
    options = "--block-size", "4", "--max-model-len", "300", "--num-kv-blocks", "200", "--max-num-seqs", "12"
    # Blocks for half of the requests: the others' states wait in host memory.
    host = "--num-host-kv-blocks", "400", "--num-host-state-slots", "16"
    started = ServerProcess(
        str(folder), "--tensor-parallel-size", "2", "--audit", "--standby-weights", *options, *host
    )
    try:
        started.wait_ready(READY_TIMEOUT_S)
        yield started
        assert started.stop() == 0, started.log
        assert "Traceback" not in started.log
    finally:
        started.close()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as opened:
        yield opened


def status_of(client: Client) -> ReplicaInfo:
    (replica,) = client.status()
    return replica


def await_status(client: Client, holds: Callable[[ReplicaInfo], bool]) -> None:
    """Wait until the condition holds: a busy replica's status may be an earlier one."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds(replica := status_of(client)):
        assert time.monotonic() < deadline, replica
        time.sleep(0.05)


def run_all(client: Client, has_begun: threading.Event | None = None) -> list[list[list[int]]]:
    """Return the tokens of all requests, which run together."""

    def run(params: SamplingParams) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in range(params.n)]
        for event in client.generate_stream(PROMPT, params):
            if isinstance(event, CompletionDelta):
                outputs[event.index] += event.token_ids
                if has_begun is not None:
                    has_begun.set()
        return outputs

    with ThreadPoolExecutor(len(PARAMS)) as threads:
        return [call.result(DEADLINE_S) for call in [threads.submit(run, params) for params in PARAMS]]


@pytest.fixture(scope="module")
def undisturbed(client: Client) -> list[list[list[int]]]:
    return run_all(client)


def disturb(client: Client, fault: Callable[[], None]) -> list[list[list[int]]]:
    has_begun = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_all, client, has_begun)
        assert has_begun.wait(DEADLINE_S)
        fault()
        return running.result(2 * DEADLINE_S)


def test_status_counts_slots(client: Client, undisturbed: list[list[list[int]]]) -> None:
    assert status_of(client).kv.num_state_slots == 2 * 12
    # Further outputs start from a snapshot.
    await_status(client, lambda replica: replica.kv.num_snapshots > 0 and replica.kv.prefix_hit_tokens > 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_continue_after_a_rank_was_killed(
    client: Client, undisturbed: list[list[list[int]]], rank: int
) -> None:
    before = status_of(client)
    assert disturb(client, lambda: os.kill(before.ranks[rank].pid, signal.SIGKILL)) == undisturbed
    await_status(client, lambda replica: replica.num_recoveries == before.num_recoveries + 1)


def test_streams_continue_after_the_scheduler_was_killed(
    client: Client,
    server: ServerProcess,
    undisturbed: list[list[list[int]]],
    scheduler_pid: Callable[[ServerProcess], int],
) -> None:
    pid = scheduler_pid(server)
    assert disturb(client, lambda: os.kill(pid, signal.SIGKILL)) == undisturbed
    assert scheduler_pid(server) != pid
