"""CPU time of an idle fleet, by process, with quire's share and Ray's share apart.

    python -m benchmarks.idle --json benchmarks/results/idle.json

Starts a Ray node of its own with two replicas of the demo model behind a gateway, waits until start-up work has
ended, and counts CPU seconds. Every actor and the gateway hold Ray's client library, whose threads are never quite
idle. The CPU time of actors and of a driver that do nothing is therefore measured as well, and subtracted.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.common import Figure, make_parser, report
from quire import Client
from quire.cluster.fleet.ray.local_cluster import attach
from quire.cluster.os_utils.processes import ProcessTree

NUM_REPLICAS = 2
# Wait after the last change, until start-up work has ended.
CALM_S = 15.0
START_TIMEOUT_S = 300.0
# part of a command line |-> name of that process of quire
QUIRE = {
    "ray::FleetController": "controller",
    "ray::SchedulerActor": "scheduler",
    "ray::WorkerActor": "rank",
    "quire.cluster.cli": "gateway",
}
# part of a command line |-> name of a process that does nothing: it shows the CPU time of Ray's library
BARE = {"ray::BareActor": "bare_actor", "--bare": "bare_driver"}
NUM_BARE_ACTORS = 2


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to count")
    parser.add_argument("--bare", metavar="ADDRESS", help="only hold actors there that do nothing")
    arguments = parser.parse_args()
    if arguments.bare is not None:
        hold_bare_actors(arguments.bare)
        return
    with ExitStack() as stack:
        address, environment = stack.enter_context(ray_node())
        target = stack.enter_context(gateway(address, environment))
        stack.enter_context(bare_actors(address, environment))
        wait_until_ready(target)
        time.sleep(CALM_S)
        figures = count(arguments.seconds, environment["QUIRE_BENCHMARK"])
    report(figures, arguments.json)


def count(seconds: float, mark: str) -> dict[str, Figure]:
    """Return percent of a core by kind of process. The processes are found by a mark in their environment."""
    before = cpu_seconds(mark)
    started = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - started
    shares: dict[str, list[float]] = defaultdict(list)
    for pid, (name, spent_s) in cpu_seconds(mark).items():
        if pid in before:
            shares[name].append(100 * (spent_s - before[pid][1]) / elapsed_s)
    ours = {name: values for name, values in shares.items() if name in QUIRE.values()}
    bare_actor = sum(shares["bare_actor"]) / NUM_BARE_ACTORS
    num_actors = sum(len(values) for name, values in ours.items() if name != "gateway")
    library = num_actors * bare_actor + sum(shares["bare_driver"])
    total = sum(map(sum, ours.values()))
    note = f"{NUM_REPLICAS} replicas of one rank, over {seconds:g} s"
    figures = {
        "idle.quire_percent": Figure(
            total - library, "% of a core", f"quire's own part of its processes; {note}"
        ),
        "idle.ray_library_percent": Figure(
            library, "% of a core", f"Ray's library in quire's {num_actors + 1} processes"
        ),
        "idle.ray_percent": Figure(
            sum(sum(shares[name]) for name in shares if name not in (*ours, *BARE.values())),
            "% of a core",
            f"Ray's own processes; {note}",
        ),
    }
    for name, values in sorted(shares.items()):
        kind = "process" if name in ours else "ray"
        figures[f"idle.{kind}.{name}_percent"] = Figure(
            sum(values), "% of a core", f"{len(values)} processes"
        )
    return figures


def cpu_seconds(mark: str) -> dict[int, tuple[str, float]]:
    """Return pid |-> (name of the process, its CPU seconds so far)."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("QUIRE_BENCHMARK") == mark:
                times = process.cpu_times()
                found[process.pid] = name_of(process), times.user + times.system
    return found


def name_of(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    for word, name in (QUIRE | BARE).items():
        if word in command:
            return name
    return process.name().partition("::")[0].replace(".", "_")


@contextmanager
def ray_node() -> Iterator[tuple[str, dict[str, str]]]:
    """Start a Ray node; yield its address and the environment of processes that use it."""
    folder = Path(tempfile.mkdtemp(prefix="qi-", dir="/tmp"))  # short: Unix sockets live in it
    port, client_port = free_port(), free_port()
    environment = dict(os.environ) | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "QUIRE_BENCHMARK": secrets.token_hex(8),
    }
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats",
        f"--port={port}", f"--ray-client-server-port={client_port}", "--node-ip-address=127.0.0.1",
        "--include-dashboard=false", f"--temp-dir={folder}/r", f"--num-cpus={2 * NUM_REPLICAS}", "--num-gpus=0",
        "--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0",
    ]  # fmt: skip
    with child(command, environment, folder / "ray.log"):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_listening(port):
            assert time.monotonic() < deadline, (folder / "ray.log").read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", environment
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def gateway(address: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Run `quire serve` on that node; yield the gateway's HOST:PORT."""
    replicas = ["--min-replicas", str(NUM_REPLICAS), "--max-replicas", str(NUM_REPLICAS)]
    command = [
        sys.executable, "-c", "from quire.cluster.cli import main; main()", "serve", "demo", "--address", address,
        "--listen", "127.0.0.1:0", "--no-http", "--num-kv-blocks", "256", *replicas,
    ]  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        child(command, environment, Path(folder) / "log") as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith("quire is ready on "), (Path(folder) / "log").read_text()
        yield line.split()[-1]


@contextmanager
def bare_actors(address: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a process that holds actors that do nothing."""
    command = [sys.executable, "-m", "benchmarks.idle", "--bare", address]
    with (
        tempfile.TemporaryDirectory() as folder,
        child(command, environment, Path(folder) / "log") as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline(), (Path(folder) / "log").read_text()
        yield


def hold_bare_actors(address: str) -> None:
    """Hold actors that do nothing until this process is ended."""
    import ray

    class BareActor:
        def is_there(self) -> bool:
            return True

    with attach(address):
        actors = [ray.remote(BareActor).options(num_cpus=0).remote() for _ in range(NUM_BARE_ACTORS)]
        ray.get([actor.is_there.remote() for actor in actors], timeout=START_TIMEOUT_S)
        print("ready", flush=True)
        signal.pause()


@contextmanager
def child(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process; end it and its descendants at the end."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        )
    try:
        yield process
    finally:
        tree = ProcessTree([process.pid])
        process.terminate()
        if tree.wait(30):
            tree.kill()
        tree.close()
        process.wait()


def wait_until_ready(target: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with Client(target) as client:
        while sum(replica.ready for replica in client.status()) < NUM_REPLICAS:
            assert time.monotonic() < deadline, "the replicas did not become ready"
            time.sleep(0.5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
