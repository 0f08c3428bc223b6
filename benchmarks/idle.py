"""CPU time of an idle server, by process: `quire serve demo`, which has a gateway, a scheduler and a rank beside Ray.

    python -m benchmarks.idle --json benchmarks/results/idle.json

It waits until start-up work has ended, and counts CPU seconds. Each actor and the gateway hold Ray's client library,
whose threads are never quite idle: their CPU time is that of quire and of the library together.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import suppress

import psutil

from benchmarks.common import Figure, make_parser, report
from quire.cluster.cli.demo.server import ServerProcess

READY_TIMEOUT_S = 300.0
# Wait until start-up work has ended.
CALM_S = 15.0
# part of a command line |-> name of that process of quire; the others are Ray's
QUIRE = {"ray::SchedulerActor": "scheduler", "ray::WorkerActor": "rank", "quire.cluster.cli": "gateway"}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to count")
    arguments = parser.parse_args()
    with ServerProcess("demo", "--device", "cpu") as server:
        server.wait_ready(READY_TIMEOUT_S)
        time.sleep(CALM_S)
        figures = count(server.process.pid, arguments.seconds)
    report(figures, arguments.json)


def count(server: int, seconds: float) -> dict[str, Figure]:
    """Return percent of a core by kind of process."""
    before, started = cpu_seconds(server), time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - started
    percents: dict[str, float] = defaultdict(float)
    for pid, (name, spent_s) in cpu_seconds(server).items():
        if pid in before:
            percents[name] += 100 * (spent_s - before[pid][1]) / elapsed_s
    note = f"over {seconds:g} s"
    return {
        f"idle.{name}_percent": Figure(value, "% of a core", note) for name, value in sorted(percents.items())
    }


def cpu_seconds(server: int) -> dict[int, tuple[str, float]]:
    """Return pid |-> (name of the process, its CPU seconds so far)."""
    found, process = {}, psutil.Process(server)
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            command, times = " ".join(each.cmdline()), each.cpu_times()
            name = next((name for word, name in QUIRE.items() if word in command), "ray")
            found[each.pid] = name, times.user + times.system
    return found


if __name__ == "__main__":
    main()
