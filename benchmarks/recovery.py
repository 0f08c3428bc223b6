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
from contextlib import contextmanager
from functools import partial

import psutil

from benchmarks.common import Figure, make_parser, report
from quire import Client, SamplingParams
from quire.cluster.demo.server import ServerProcess
from quire.cluster.requests.outputs import CompletionDelta

PROMPT = "It was"
NUM_STREAMS = 4
PARAMS = SamplingParams(max_tokens=600, ignore_eos=True, seed=1, temperature=0.8)
# Tokens of each stream before the fault.
NUM_BEFORE = 50
READY_TIMEOUT_S = 300.0


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=10, help="faults of each kind")
    parser.add_argument("--kinds", nargs="+", default=[*FAULTS], choices=[*FAULTS], help="kinds of faults")
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    with server() as (started, client, ready_s):
        figures["recovery.restart_all_s"] = Figure(ready_s, "s", "start of the whole server instead")
        expected = list(client.generate(PROMPT, PARAMS).outputs[0].token_ids)
        for kind in arguments.kinds:
            seconds = [
                measure(client, expected, partial(FAULTS[kind], started, client, number))
                for number in range(arguments.kills)
            ]
            note = f"fault to next token of the slowest of {NUM_STREAMS} streams, {arguments.kills} faults"
            figures[f"recovery.{kind}.p50_s"] = Figure(statistics.median(seconds), "s", note)
            figures[f"recovery.{kind}.max_s"] = Figure(max(seconds), "s", note)
    report(figures, arguments.json)


@contextmanager
def server() -> Iterator[tuple[ServerProcess, Client, float]]:
    """Yield a server, a client, and the seconds from the start of the server to its first token."""
    begun = time.monotonic()
    started = ServerProcess("demo", "--tensor-parallel-size", "2")
    try:
        started.wait_ready(READY_TIMEOUT_S)
        with Client(started.address) as client:
            client.generate(PROMPT, SamplingParams(max_tokens=1))
            yield started, client, time.monotonic() - begun
        started.stop()
    finally:
        started.close()


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
