"""A fleet on one machine: `python examples/fleet_on_one_machine.py`

Starts a Ray node and `quire serve` with two replicas of the demo model. Streams a completion, kills a rank of the
replica that computes it, and shows that the stream continues. Takes about a minute.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
START_TIMEOUT_S = 240.0
NUM_TOKENS = 200


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command until the block ends, and end it with SIGTERM."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


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


def read_address(serve: subprocess.Popen[str]) -> str:
    """Return the gateway's HOST:PORT when it is ready."""
    assert serve.stdout is not None
    for line in serve.stdout:
        print(line, end="")
        if line.startswith("quire is ready on "):
            return line.split()[-1]
    raise errors.ReplicaUnavailable(f"quire serve ended with exit status {serve.wait()}")


def wait_for_replicas(client: Client, num_replicas: int) -> None:
    """Return when so many replicas are ready."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while sum(each.ready for each in client.status()) < num_replicas:
        if time.monotonic() > deadline:
            raise errors.ReplicaUnavailable(
                f"{num_replicas} replicas were not ready in {START_TIMEOUT_S:g} s"
            )
        time.sleep(0.5)


def stream_with_failure(client: Client) -> None:
    """Stream a completion, and kill a rank of its replica after a tenth of the tokens."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
    num_received, killed = 0, False
    for event in client.generate_stream("It was a dark night, and", params):
        if isinstance(event, CompletionDelta):
            num_received += len(event.token_ids)
        if isinstance(event, CompletionFinished):
            timings = event.timings
            print(
                f"{num_received} tokens came: {timings.num_moves} moves, {timings.num_recoveries} recoveries"
            )
        if not killed and num_received >= NUM_TOKENS // 10:
            (busy,) = [each for each in client.status() if each.queue.num_running]
            killed = True
            os.kill(busy.ranks[0].pid, signal.SIGKILL)
            print(f"killed rank 0 of {busy.replica_id} after {num_received} tokens")


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with tempfile.TemporaryDirectory(prefix="qrn-") as folder:
        fleet = Path(folder) / "fleet.toml"
        fleet.write_text(FLEET)
        ray = [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=4",
            "--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={folder}/r", "--num-gpus=0",
            "--object-store-memory=80000000",
        ]  # fmt: skip
        quire = [
            sys.executable, "-m", "quire", "serve", str(fleet), "--address", f"127.0.0.1:{port}",
            "--listen", "127.0.0.1:0", "--no-http",
        ]  # fmt: skip
        with running(ray, environment):
            wait_for_port(port)
            with running(quire, environment) as serve, Client(read_address(serve)) as client:
                wait_for_replicas(client, 2)
                print("two replicas are ready")
                stream_with_failure(client)


if __name__ == "__main__":
    main()
