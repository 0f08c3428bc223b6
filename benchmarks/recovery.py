"""Seconds from a fault to the next token of a running stream, on `quire serve demo` with two ranks.

    python -m benchmarks.recovery --kills 10 --json benchmarks/results/recovery.json

Kills or stops a process while streams run, alternately rank 0 and rank 1, and compares all tokens with those of an
undisturbed run. The time is that of the slowest stream. `restart_all` shows the time that a restart of the whole
server takes for comparison: from the start of the command to its first token.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import psutil

from benchmarks.common import Figure, make_parser, report
from quire import Client, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.text.requests.outputs import CompletionDelta

PROMPT = "It was"
NUM_STREAMS = 4
PARAMS = SamplingParams(max_tokens=600, ignore_eos=True, seed=1, temperature=0.8)
# Tokens of each stream before the fault.
NUM_BEFORE = 50
READY_TIMEOUT_S = 300.0
# A process that uses a smaller share of a core has imported its modules.
IDLE_SHARE = 0.1


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=10, help="faults of each kind")
    parser.add_argument("--kinds", nargs="+", default=[*FAULTS], choices=[*FAULTS], help="kinds of faults")
    parser.add_argument(
        "--spare-processes", type=int, default=1, help="of the server; a fault waits until one is ready"
    )
    parser.add_argument("--standby-weights", action="store_true", help="of the server")
    parser.add_argument("--model", default="demo")
    arguments = parser.parse_args()
    options = ["--spare-processes", str(arguments.spare_processes)]
    if arguments.standby_weights:
        options.append("--standby-weights")
    figures: dict[str, Figure] = {}
    with server(arguments.model, options) as (started, client, ready_s):
        figures["recovery.restart_all_s"] = Figure(ready_s, "s", "start of the whole server instead")
        expected = list(client.generate(PROMPT, PARAMS).outputs[0].token_ids)
        for kind in arguments.kinds:
            seconds = []
            for number in range(arguments.kills):
                if arguments.spare_processes:
                    wait_for_process(lambda: idle_processes(started, "ray::IDLE"))
                if arguments.standby_weights:
                    wait_for_process(lambda: standby_processes(started, client))
                seconds.append(measure(client, expected, partial(FAULTS[kind], started, client, number)))
            note = f"fault to next token of the slowest of {NUM_STREAMS} streams, {arguments.kills} faults"
            figures[f"recovery.{kind}.p50_s"] = Figure(statistics.median(seconds), "s", note)
            figures[f"recovery.{kind}.max_s"] = Figure(max(seconds), "s", note)
    report(figures, arguments.json)


@contextmanager
def server(model: str, options: list[str]) -> Iterator[tuple[ServerProcess, Client, float]]:
    """Yield a server, a client, and the seconds from the start of the server to its first token."""
    begun = time.monotonic()
    started = ServerProcess(model, "--tensor-parallel-size", "2", *options)
    try:
        started.wait_ready(READY_TIMEOUT_S)
        with Client(started.address) as client:
            client.generate(PROMPT, SamplingParams(max_tokens=1))
            yield started, client, time.monotonic() - begun
        started.stop()
    finally:
        started.close()


def wait_for_process(find: Callable[[], dict[int, float]]) -> None:
    """Wait until there is a process that has imported its modules.

    Args:
        find: as idle_processes.

    Raises:
        TimeoutError: there is none.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    used_s: dict[int, float] = {}
    while time.monotonic() < deadline:
        before, used_s = used_s, find()
        if any(
            seconds > 0 and seconds - before.get(pid, 0.0) < IDLE_SHARE for pid, seconds in used_s.items()
        ):
            return
        time.sleep(1.0)
    raise TimeoutError(f"no process was ready in {READY_TIMEOUT_S:g} s")


def standby_processes(started: ServerProcess, client: Client) -> dict[int, float]:
    """As idle_processes, of ranks' actors that are no rank."""
    (replica,) = client.status()
    ranks = {rank.pid for rank in replica.ranks}
    found = idle_processes(started, "ray::WorkerActor")
    return {pid: seconds for pid, seconds in found.items() if pid not in ranks}


def idle_processes(started: ServerProcess, title: str) -> dict[int, float]:
    """Return the pids of Ray's processes of a title |-> processor seconds so far."""
    found = {}
    for each in psutil.Process(started.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if title in " ".join(each.cmdline()):
                times = each.cpu_times()
                found[each.pid] = times.user + times.system
    return found


def kill_rank(started: ServerProcess, client: Client, number: int) -> None:
    os.kill(rank_pid(client, number), signal.SIGKILL)


def stop_rank(started: ServerProcess, client: Client, number: int) -> None:
    os.kill(rank_pid(client, number), signal.SIGSTOP)


def kill_scheduler(started: ServerProcess, client: Client, number: int) -> None:
    processes = psutil.Process(started.process.pid).children(recursive=True)
    (pid,) = [each.pid for each in processes if "SchedulerActor" in " ".join(each.cmdline())]
    os.kill(pid, signal.SIGKILL)


FAULTS: dict[str, Callable[[ServerProcess, Client, int], None]] = {
    "kill_rank": kill_rank,
    "stop_rank": stop_rank,
    "kill_scheduler": kill_scheduler,
}


def rank_pid(client: Client, number: int) -> int:
    (replica,) = client.status()
    return replica.ranks[number % len(replica.ranks)].pid


def measure(client: Client, expected: list[int], fault: Callable[[], None]) -> float:
    """Return the longest pause of a stream after the fault.

    Raises:
        RuntimeError: a token differs from the undisturbed run.
    """
    streams = [_Stream(client) for _ in range(NUM_STREAMS)]
    for stream in streams:
        stream.has_begun.wait(READY_TIMEOUT_S)
    fault()
    for stream in streams:
        stream.thread.join(READY_TIMEOUT_S)
        if stream.token_ids != expected:
            raise RuntimeError(f"a stream has {len(stream.token_ids)} tokens, other than without the fault")
    return max(stream.longest_pause_s for stream in streams)


class _Stream:
    """A stream on a thread of its own."""

    def __init__(self, client: Client) -> None:
        self.token_ids: list[int] = []
        self.longest_pause_s = 0.0
        self.has_begun = threading.Event()
        self._events = client.generate_stream(PROMPT, PARAMS)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        last = time.monotonic()
        for event in self._events:
            if not isinstance(event, CompletionDelta):
                continue
            now = time.monotonic()
            if self.has_begun.is_set():
                self.longest_pause_s = max(self.longest_pause_s, now - last)
            last = now
            self.token_ids += event.token_ids
            if len(self.token_ids) >= NUM_BEFORE:
                self.has_begun.set()


if __name__ == "__main__":
    main()
