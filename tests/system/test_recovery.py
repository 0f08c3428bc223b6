"""A killed or stopped process of a server costs its streams a pause, and changes none of their tokens."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from adapters import write_adapter
from deadlines import READY_TIMEOUT_S
from server_processes import command_of, processes_with

from quire import Client, SamplingParams, StructuredOutputsParams
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.client.wire.status import ReplicaInfo
from quire.cluster.config.engine_options import DEMO_MODEL_PATH
from quire.cluster.text.requests.outputs import CompletionDelta, CompletionFinished

pytestmark = pytest.mark.cluster

DEADLINE_S = READY_TIMEOUT_S
# A status comes within 0.5 s whatever hangs, and not with the end of the step, whose deadline is 60 s.
STATUS_S = 55.0
# A process that has to wait for a processor may see neither the streams run nor the ranks recover.
MOST_TRIES = 5
NUM_TOKENS = 300
PROMPT = "It was"
# Its ranks draft what it leaves no choice of.
FORM = StructuredOutputsParams(regex="([a-z]{3,9} is the ship of the number [0-9]{2}, ){40}")
KINDS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0),
    "seed, n and penalties": SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, seed=7, n=3, temperature=0.9, repetition_penalty=1.1,
    ),
    "stop string": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=3, stop=("zq",)),
    "beams": SamplingParams(max_tokens=60, beam_width=3, n=2),
    "form": SamplingParams(max_tokens=NUM_TOKENS, seed=5, structured_outputs=FORM),
    "beams of a form": SamplingParams(max_tokens=60, beam_width=3, structured_outputs=FORM),
    "adapter": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=9),
}  # fmt: skip
# Kind |-> the model that it names: an adapter, which the ranks of a recovered group read again.
MODELS = {"adapter": "sea"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "sea", DEMO_MODEL_PATH)
    adapters = "--enable-lora", "--lora-modules", f"sea={adapter}"
    started = ServerProcess("demo", "--tensor-parallel-size", "2", "--audit", "--standby-weights", *adapters)
    try:
        started.wait_ready(READY_TIMEOUT_S)
        yield started
        assert started.stop() == 0, started.log
        assert "Traceback" not in started.log
        assert started.leftovers() == []
    finally:
        started.close()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as opened:
        yield opened


@pytest.fixture(scope="module")
def undisturbed(client: Client) -> dict[str, list[list[int]]]:
    """The tokens of each kind, of requests that run together; in sequence they take four times as many steps."""
    with ThreadPoolExecutor(len(KINDS) + 1) as threads:
        calls = {
            name: threads.submit(client.generate, PROMPT, params, model=MODELS.get(name, ""))
            for name, params in KINDS.items()
        }
        without = threads.submit(client.generate, PROMPT, KINDS["adapter"]).result(DEADLINE_S).outputs
        outputs = {name: call.result(DEADLINE_S).outputs for name, call in calls.items()}
    assert outputs["adapter"][0].token_ids != without[0].token_ids
    return {name: [list(each.token_ids) for each in found] for name, found in outputs.items()}


class Stream:
    """A stream on a thread of its own."""

    def __init__(self, client: Client, params: SamplingParams, model: str = "") -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(params.n)]
        self.finished: list[CompletionFinished] = []
        self.has_begun = threading.Event()
        self._events = client.generate_stream(PROMPT, params, model=model)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._events:
                if isinstance(event, CompletionDelta):
                    self.token_ids[event.index] += event.token_ids
                    self.has_begun.set()
                elif isinstance(event, CompletionFinished):
                    self.finished.append(event)
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the stream did not end"
        if self._error is not None:
            raise self._error


def until_seen(attempt: Callable[[], bool]) -> None:
    """Repeat an attempt until it returns True: the fault came while the streams ran, and all processes were quick.

    A standby or a rank that does not answer a scheduler in some seconds is replaced as well.
    """
    assert any(attempt() for _ in range(MOST_TRIES)), f"not seen in {MOST_TRIES} attempts"


def disturb(
    client: Client, undisturbed: dict[str, list[list[int]]], fault: Callable[[], None]
) -> dict[str, Stream]:
    """Run a stream of each kind, cause the fault while they run, and compare all tokens."""
    streams = {name: Stream(client, params, MODELS.get(name, "")) for name, params in KINDS.items()}
    assert streams["greedy"].has_begun.wait(DEADLINE_S)
    fault()
    for name, stream in streams.items():
        stream.join()
        assert stream.token_ids == undisturbed[name], name
    return streams


def waiting_pids(server: ServerProcess, client: Client) -> set[int]:
    """Wait until there are a standby and an idle process of Ray, which takes its place; return their pids."""
    deadline = time.monotonic() + DEADLINE_S
    ranks = {each.pid for each in status_of(client).ranks}
    while True:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        commands = {each.pid: command_of(each) for each in processes if each.pid not in ranks}
        standbys, spares = (
            {pid for pid, command in commands.items() if title in command}
            for title in ("ray::WorkerActor", "ray::IDLE")
        )
        if standbys and spares:
            return standbys | spares
        assert time.monotonic() < deadline, f"standbys {standbys}, spare processes {spares}"
        time.sleep(0.1)


def segments_of(pid: int) -> set[str]:
    """Return the names of the weights that a process maps."""
    return set(re.findall(r"/memfd:(quire-weights-\w+)", Path(f"/proc/{pid}/maps").read_text()))


def await_kept(pid: int, names: set[str]) -> None:
    """Wait until the scheduler has the weights of a rank open; it maps none of them."""
    deadline = time.monotonic() + DEADLINE_S
    while not names <= set(map(open_file, Path(f"/proc/{pid}/fd").iterdir())):
        assert time.monotonic() < deadline, f"the scheduler does not keep {names}"
        time.sleep(0.05)
    assert not segments_of(pid)


def open_file(descriptor: Path) -> str:
    """Return the name of an anonymous file; empty for others."""
    try:
        found = re.fullmatch(r"/memfd:(.*) \(deleted\)", os.readlink(descriptor))
    except FileNotFoundError:  # closed meanwhile
        return ""
    return found[1] if found else ""


def status_of(client: Client) -> ReplicaInfo:
    asked_at = time.monotonic()
    (replica,) = client.status()
    assert time.monotonic() - asked_at < STATUS_S
    return replica


def await_status(client: Client, holds: Callable[[ReplicaInfo], bool]) -> ReplicaInfo:
    """Return the first status for which the condition holds; there is none while a scheduler is replaced."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := [replica for replica in client.status() if holds(replica)]):
        assert time.monotonic() < deadline, client.status()
        time.sleep(0.05)
    return found[0]


def await_successor(server: ServerProcess, pid: int) -> None:
    """Wait until another process is the scheduler."""
    deadline = time.monotonic() + DEADLINE_S
    while not {each.pid for each in processes_with("SchedulerActor", server.process.pid)} - {pid}:
        assert time.monotonic() < deadline, "the scheduler was not replaced"
        time.sleep(0.05)


def num_recoveries(streams: dict[str, Stream]) -> int:
    return max(each.timings.num_recoveries for stream in streams.values() for each in stream.finished)


@pytest.mark.parametrize(("rank", "signal_number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_streams_continue_after_a_rank_failed(
    client: Client,
    server: ServerProcess,
    undisturbed: Any,
    rank: int,
    signal_number: int,
    scheduler_pid: Callable[[ServerProcess], int],
) -> None:
    def attempt() -> bool:
        before, waiting = await_status(client, lambda replica: replica.ready), waiting_pids(server, client)
        weights = segments_of(before.ranks[rank].pid)
        assert weights
        await_kept(scheduler_pid(server), weights)

        def fault() -> None:
            os.kill(before.ranks[rank].pid, signal_number)
            if (status := await_recovery(client, before)).activity == "recovering":
                assert f"rank {rank} failed" in status.problem  # and at which step, unless all streams ended
                assert not status.ready

        streams = disturb(client, undisturbed, fault)
        after = await_status(client, lambda replica: replica.num_recoveries > before.num_recoveries)
        assert after.ranks[rank].pid != before.ranks[rank].pid
        is_of_waiting = after.ranks[rank].pid in waiting and segments_of(after.ranks[rank].pid) == weights
        keeps_other = after.ranks[1 - rank].pid == before.ranks[1 - rank].pid  # with its weights
        return num_recoveries(streams) == 1 and is_of_waiting and keeps_other

    until_seen(attempt)


def await_recovery(client: Client, before: ReplicaInfo) -> ReplicaInfo:
    """Return a status of the recovery, or one after it, if it was shorter than a look."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        status = status_of(client)
        if status.activity == "recovering" or status.num_recoveries > before.num_recoveries:
            return status
        assert time.monotonic() < deadline, "the fault was not noticed"


def test_streams_continue_after_the_scheduler_was_killed(
    client: Client,
    server: ServerProcess,
    undisturbed: Any,
    scheduler_pid: Callable[[ServerProcess], int],
) -> None:
    def attempt() -> bool:
        before = await_status(client, lambda replica: replica.ready)
        pid = scheduler_pid(server)
        streams = disturb(client, undisturbed, lambda: os.kill(pid, signal.SIGKILL))
        await_successor(server, pid)
        after = await_status(client, lambda replica: replica.ready)
        num_moves = max(each.timings.num_moves for stream in streams.values() for each in stream.finished)
        # With their weights.
        return num_moves == 1 and [each.pid for each in after.ranks] == [each.pid for each in before.ranks]

    until_seen(attempt)


def test_streams_continue_after_the_scheduler_was_killed_amid_a_recovery(
    client: Client,
    server: ServerProcess,
    undisturbed: Any,
    scheduler_pid: Callable[[ServerProcess], int],
) -> None:
    """The next scheduler finds the process that was to replace a rank, which has no weights yet."""

    def attempt() -> bool:
        before = await_status(client, lambda replica: replica.ready)
        pid, seen = scheduler_pid(server), list[str]()

        def fault() -> None:
            os.kill(before.ranks[1].pid, signal.SIGKILL)
            seen.append(await_recovery(client, before).activity)
            os.kill(pid, signal.SIGKILL)

        disturb(client, undisturbed, fault)
        await_successor(server, pid)
        after = await_status(
            client, lambda replica: replica.ready and replica.ranks[1].pid != before.ranks[1].pid
        )
        return seen == ["recovering"] and after.ranks[0].pid == before.ranks[0].pid  # with its weights

    until_seen(attempt)
