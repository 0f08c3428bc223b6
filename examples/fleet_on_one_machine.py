"""A fleet on one machine: `python examples/fleet_on_one_machine.py`

Starts a Ray node and `quire serve` with two replicas of the demo model. Streams a completion, kills a rank of the
replica that computes it, and shows that the stream continues. Takes about a minute on quiet cores.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from quire import Client, CompletionDelta, CompletionFinished, SamplingParams, errors

FLEET = """
[[model]]
model = "demo"
min_replicas = 2
max_replicas = 2
rank_resources = { CPU = 1.0 }
"""
START_TIMEOUT_S = 300.0
NUM_TOKENS = 600


@contextmanager
def running(command: list[str], log: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command whose output goes to a file until the block ends, and end it with SIGTERM."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    except BaseException:
        print(f"end of the output of {command[:4]}:", log.read_text(errors="replace")[-2000:], sep="\n")
        raise
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_for_port(port: int) -> None:
    """Return when something listens on the port."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def wait_for_replicas(client: Client, num_replicas: int) -> None:
    """Return when so many replicas are ready; print what changes until then."""
    deadline, shown, num_ready = time.monotonic() + START_TIMEOUT_S, "", 0
    while num_ready < num_replicas:
        if time.monotonic() > deadline:
            raise errors.ReplicaUnavailable(f"{num_ready} replicas were ready in {START_TIMEOUT_S:g} s")
        replicas = client.status()
        num_ready = sum(each.ready for each in replicas)
        states = ", ".join(f"{each.replica_id} {'ready' if each.ready else each.state}" for each in replicas)
        if states != shown:
            print(states, flush=True)
        shown = states
        time.sleep(0.5)
    print(f"{num_replicas} replicas are ready", flush=True)


def kill_a_busy_rank(client: Client) -> None:
    """Kill rank 0 of a replica that computes a request."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        for replica in client.status():
            if replica.queue.num_running:
                os.kill(replica.ranks[0].pid, signal.SIGKILL)
                print(f"killed rank 0 of {replica.replica_id}", flush=True)
                return


def stream_with_failure(client: Client) -> None:
    """Stream a completion while a rank of its replica is killed."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
    killer = threading.Thread(target=kill_a_busy_rank, args=(client,))
    killer.start()
    num_received = 0
    for event in client.generate_stream("It was a dark night, and", params):
        if isinstance(event, CompletionDelta):
            num_received += len(event.token_ids)
        elif isinstance(event, CompletionFinished):
            timings = event.timings
            print(
                f"{num_received} tokens came: {timings.num_moves} moves, {timings.num_recoveries} recoveries"
            )
    killer.join()


def main() -> None:
    ray_port, port = free_port(), free_port()
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with tempfile.TemporaryDirectory(prefix="qrn-") as name:
        folder = Path(name)
        (folder / "fleet.toml").write_text(FLEET)
        ray = [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={ray_port}",
            "--node-ip-address=127.0.0.1", "--num-cpus=4", "--num-gpus=0", "--include-dashboard=false",
            f"--temp-dir={folder}/r", "--object-store-memory=80000000",
        ]  # fmt: skip
        quire = [
            sys.executable, "-m", "quire", "serve", str(folder / "fleet.toml"), "--address", f"127.0.0.1:{ray_port}",
            "--listen", f"127.0.0.1:{port}", "--no-http",
        ]  # fmt: skip
        with running(ray, folder / "ray.log", variables):
            wait_for_port(ray_port)
            with running(quire, folder / "serve.log", variables), Client(f"127.0.0.1:{port}") as client:
                wait_for_port(port)
                wait_for_replicas(client, 2)
                stream_with_failure(client)


if __name__ == "__main__":
    main()
