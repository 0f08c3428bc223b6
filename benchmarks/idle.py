"""What a fleet costs while nobody asks it for anything: CPU time of each of its processes, quire's and Ray's apart.

    python -m benchmarks.idle --json benchmarks/results/idle.json

Starts a Ray node of its own with two replicas of the demo model behind a gateway, waits until all is calm, and counts
CPU seconds for a while. A gateway and the actors hold Ray's client library, whose threads count as quire's here.
"""

from __future__ import annotations

import os
import secrets
import shutil
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

from quire import Client
from quire.cluster.processes import ProcessTree

from .common import Figure, parser, report

NUM_REPLICAS = 2
# After the last change, until start-up work has died down.
CALM_S = 15.0
START_TIMEOUT_S = 300.0
# What a process of quire is called, by what its command line contains.
QUIRE = {
    "ray::FleetController": "controller",
    "ray::SchedulerActor": "scheduler",
    "ray::WorkerActor": "rank",
    "quire.cluster.cli": "gateway",
}


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--seconds", type=float, default=30.0, help="how long to count")
    arguments = line.parse_args()
    with ExitStack() as stack:
        address, environment = stack.enter_context(ray_node())
        target = stack.enter_context(gateway(address, environment))
        wait_until_ready(target)
        time.sleep(CALM_S)
        figures = count(arguments.seconds, environment["QUIRE_BENCHMARK"])
    report(figures, arguments.json)


def count(seconds: float, mark: str) -> dict[str, Figure]:
    """Percent of a core that each kind of process takes. Ours are known by a mark in their environment."""
    before = cpu_seconds(mark)
    started = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - started
    shares: dict[str, list[float]] = defaultdict(list)
    for pid, (name, spent_s) in cpu_seconds(mark).items():
        if pid in before:
            shares[name].append(100 * (spent_s - before[pid][1]) / elapsed_s)
    ours = {name: values for name, values in shares.items() if name in QUIRE.values()}
    note = f"{NUM_REPLICAS} replicas of one rank, over {seconds:g} s"
    figures = {
        "idle.quire_percent": Figure(sum(map(sum, ours.values())), "% of a core", f"all of quire's; {note}"),
        "idle.ray_percent": Figure(
            sum(sum(values) for name, values in shares.items() if name not in ours),
            "% of a core",
            f"Ray's; {note}",
        ),
    }
    for name, values in sorted(shares.items()):
        kind = "quire" if name in ours else "ray"
        figures[f"idle.{kind}.{name}_percent"] = Figure(
            sum(values), "% of a core", f"{len(values)} processes"
        )
    return figures


def cpu_seconds(mark: str) -> dict[int, tuple[str, float]]:
    """pid |-> what the process is, and the CPU time that it has taken."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("QUIRE_BENCHMARK") == mark:
                times = process.cpu_times()
                found[process.pid] = name_of(process), times.user + times.system
    return found


def name_of(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    for word, name in QUIRE.items():
        if word in command:
            return name
    return process.name().partition("::")[0].replace(".", "_")


@contextmanager
def ray_node() -> Iterator[tuple[str, dict[str, str]]]:
    """A node of its own: its address, and the environment of processes that use it."""
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
    """`quire serve` on that node; the gateway's HOST:PORT."""
    replicas = ["--min-replicas", str(NUM_REPLICAS), "--max-replicas", str(NUM_REPLICAS)]
    command = [
        sys.executable, "-c", "from quire.cluster.cli import main; main()", "serve", "demo", "--address", address,
        "--listen", "127.0.0.1:0", "--num-kv-blocks", "256", *replicas,
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
def child(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended with all that descends from it."""
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
