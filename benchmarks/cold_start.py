"""Cold starts: seconds from asking for a replica to its first token, by stage, on one machine.

    python -m benchmarks.cold_start --json benchmarks/results/cold_start.json

`serve` is the command `quire serve demo`, from its start to readiness. `replica` is a replica that is asked of a
cluster that runs already, whose processes have imported their modules; `replica_unprepared` finds processes that
have not. Processor time counts all processes, and depends less on what else the machine does. Weights are in the page
cache. `serve_stop` is the time from SIGTERM to the process group, as systemd sends it, to the end of `quire serve`.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil

from benchmarks.common import Figure, make_parser, median, report
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.fleet.ray import local_cluster
from quire.cluster.fleet.ray.local_cluster import LocalCluster
from quire.cluster.fleet.replica.canary import run_canary
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.fleet.replica.launch import launch_replica
from quire.cluster.fleet.replica.launch_progress import LaunchProgress, LaunchStage
from quire.cluster.fleet.replica.replica import Replica, new_replica_id
from quire.proto.config import EngineConfig

TIMEOUT_S = 300.0
# A process pool is prepared when its processes have used no more than this share of a core for SETTLE_S.
IDLE_SHARE = 0.1
SETTLE_S = 2.0
_LAP = re.compile(r"(\w+) ([\d.]+) s")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=3, help="starts of each kind; the median counts")
    arguments = parser.parse_args()
    config = resolve(EngineOptions("demo", device="cpu"), Machine.this())
    figures: dict[str, Figure] = {}
    measures: dict[str, Callable[[], Mapping[str, float]]] = {
        "serve": measure_serve,
        "replica": lambda: measure_replica(config),
        "replica_unprepared": lambda: measure_unprepared(config),
    }
    for name, measure in measures.items():
        runs = [measure() for _ in range(arguments.runs)]
        for stage in runs[0]:
            seconds = median([run[stage] for run in runs])
            figures[f"{name}_{stage}_s"] = Figure(seconds, "s", f"median of {arguments.runs}")
    report(figures, arguments.json)


def measure_serve() -> dict[str, float]:
    """Return seconds by stage of `quire serve demo`, the whole from the process's start, and processor seconds."""
    started = time.monotonic()
    with ServerProcess("demo", "--device", "cpu") as server:
        server.wait_ready(TIMEOUT_S)
        total_s, cpu_s = time.monotonic() - started, processor_seconds(server.process.pid)
        (line,) = re.findall(r"ready after [\d.]+ s: (.*)", server.log)
        stop_from = time.monotonic()
        if status := server.stop(to_group=True):
            raise RuntimeError(f"the server ended with exit status {status}: {server.log}")
        stop_s = time.monotonic() - stop_from
    laps = {stage: float(seconds) for stage, seconds in _LAP.findall(line)}
    return {
        "start": total_s - sum(laps.values()),
        **laps,
        "total": total_s,
        "processor": cpu_s,
        "stop": stop_s,
    }


def measure_replica(config: EngineConfig) -> dict[str, float]:
    """Return seconds by stage from the request for a replica to its canary token."""
    with LocalCluster(2) as cluster:
        wait_until_idle()
        cpu_before = processor_seconds(os.getpid())
        stages: dict[str, float] = {}
        entered = [("place", time.monotonic())]

        def on_progress(progress: LaunchProgress) -> None:
            now, names = time.monotonic(), {LaunchStage.STARTING: "processes", LaunchStage.LOADING: "load"}
            if progress.stage in names or progress.stage is LaunchStage.STARTED:
                name, since = entered[-1]
                stages[name] = now - since
                entered.append((names.get(progress.stage, "canary"), now))

        with launch_replica(config, new_replica_id(), cluster, on_progress=on_progress) as replica:
            asyncio.run(first_token(replica))
            stages["canary"] = time.monotonic() - entered[-1][1]
            stages["total"] = time.monotonic() - entered[0][1]
            stages["processor"] = processor_seconds(os.getpid()) - cpu_before
        return stages


def measure_unprepared(config: EngineConfig) -> Mapping[str, float]:
    """As `measure_replica`, with processes that have imported only Ray."""
    with no_preloaded_module():
        return measure_replica(config)


async def first_token(replica: Replica) -> None:
    client = ReplicaClient(replica.address, replica.replica_id)
    client.start()
    try:
        await run_canary(client, TIMEOUT_S)
    finally:
        await client.close()


def wait_until_idle() -> None:
    """Wait until the processes that this one started have nothing to do."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        before = processor_seconds(os.getpid())
        time.sleep(SETTLE_S)
        if processor_seconds(os.getpid()) - before < IDLE_SHARE * SETTLE_S:
            return
    raise TimeoutError(f"Ray's processes were not idle in {TIMEOUT_S:g} s")


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants."""
    total = 0.0
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


@contextmanager
def no_preloaded_module() -> Iterator[None]:
    preloaded, local_cluster.PRELOADED_MODULE = local_cluster.PRELOADED_MODULE, ""
    try:
        yield
    finally:
        local_cluster.PRELOADED_MODULE = preloaded


if __name__ == "__main__":
    main()
