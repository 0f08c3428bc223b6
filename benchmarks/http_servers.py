"""Streamed completions over HTTP: `quire serve`, and vLLM's server with the same client, model and prompts.

    python -m benchmarks.http_servers --json FILE
    python -m benchmarks.http_servers --peers DIR --json benchmarks/results/http_servers.json

The requests are those of workload w1 (`benchmarks.workloads`), as many at a time as the figure's name says. DIR has
the environments of `benchmarks.peers.install`. The servers run one after the other. A gap is the time between two
chunks of a stream; a server that sends several tokens in a chunk has fewer and longer ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.common import Figure, make_parser, report
from benchmarks.peers.engine import Requests
from benchmarks.peers.install import python_path
from benchmarks.peers.process import FOLDER
from benchmarks.random_models import MODELS, make_model
from benchmarks.workloads import mixed
from quire.cluster.cli.demo.server import ServerProcess

MAX_MODEL_LEN = 2048
NUM_STREAMS = (1, 16)
# Requests per stream: enough for a stable median, few enough for a slow server.
REQUESTS_PER_STREAM = {1: 6, 16: 2}
START_TIMEOUT_S = 900.0
END_TIMEOUT_S = 60.0


@dataclass
class Times:
    """Seconds: from a request to its first chunk, and between chunks."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


async def complete(
    client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int, times: Times
) -> int:
    """Stream one completion and return its number of tokens. Raises RuntimeError if the stream is cut short."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    started = last = time.perf_counter()
    num_chunks = 0
    async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return max_tokens
            if line.startswith("data: "):
                now = time.perf_counter()
                (times.gaps if num_chunks else times.first).append(now - (last if num_chunks else started))
                last, num_chunks = now, num_chunks + 1
    raise RuntimeError("a stream ended without its last event")


async def load(url: str, model: str, requests: Requests, num_streams: int) -> tuple[float, Times]:
    """Return tokens per second, and the times of all streams."""
    times, slots = Times(), asyncio.Semaphore(num_streams)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as client:
        await complete(client, model, requests[0][0][:32], 8, Times())

        async def one(prompt: list[int], max_tokens: int) -> int:
            async with slots:
                return await complete(client, model, prompt, max_tokens, times)

        started = time.perf_counter()
        num_tokens = sum(await asyncio.gather(*(one(*request) for request in requests)))
        return num_tokens / (time.perf_counter() - started), times


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready.

    Attributes:
        model: the name that it serves its model by.
        pid: of the process above all others.
        spins: the processes below it use the processor while they wait, too.
    """

    url: str
    model: str
    pid: int
    spins: bool = False


@contextmanager
def quire_server(folder: Path, *options: str) -> Iterator[Server]:
    """Serve a model with float32, and further options."""
    with ServerProcess(str(folder), "--dtype", "float32", *options) as server:
        server.wait_ready(START_TIMEOUT_S)
        yield Server(server.http_url, folder.name, server.process.pid)


@contextmanager
def vllm_server(
    folder: Path, environments: Path, *options: str, variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """As `quire_server`, with vLLM.

    Args:
        environments: folder of benchmarks.peers.install.
        variables: environment variables.

    Raises:
        RuntimeError: it is not installed there, or did not start.
    """
    python = python_path(environments, "vllm")
    if not python.exists():
        raise RuntimeError("vllm is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(folder), "--served-model-name", folder.name,
        "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port), *options,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    pipe, alive = os.pipe()  # the supervisor ends the server when `alive` is closed
    with tempfile.TemporaryFile() as log:
        supervisor = subprocess.Popen(
            [sys.executable, str(FOLDER / "supervisor.py"), str(pipe), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[pipe],
            env=os.environ | (variables or {}),
            start_new_session=True,
        )
    os.close(pipe)
    try:
        wait_until_healthy(url, supervisor)
        yield Server(url, folder.name, supervisor.pid, spins=True)
    finally:
        os.close(alive)
        supervisor.wait(END_TIMEOUT_S)


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server of {url} ended with exit status {server.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=5.0).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)  # it does not listen yet
    raise RuntimeError(f"the server of {url} was not healthy in {START_TIMEOUT_S:g} s")


def measure(engine: str, server: Server) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for num_streams in NUM_STREAMS:
        requests = mixed(num_streams * REQUESTS_PER_STREAM[num_streams], num_streams)
        tokens_per_s, times = asyncio.run(load(server.url, server.model, requests, num_streams))
        name, note = f"http_servers.{engine}.{num_streams}", f"{len(requests)} requests"
        gaps = sorted(times.gaps)
        figures |= {
            f"{name}.tokens_per_s": Figure(tokens_per_s, "tokens/s", note),
            f"{name}.first_ms_p50": Figure(1e3 * statistics.median(times.first), "ms", note),
            f"{name}.gap_ms_p50": Figure(1e3 * statistics.median(gaps), "ms", f"{len(gaps)} gaps"),
            f"{name}.gap_ms_p99": Figure(1e3 * gaps[int(0.99 * len(gaps))], "ms", f"{len(gaps)} gaps"),
        }
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="also measure vLLM, of this folder")
    parser.add_argument("--model", choices=tuple(MODELS), default="s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report(run(arguments, Path(scratch) / arguments.model), arguments.json)


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Figure]:
    make_model(folder, arguments.model)
    options = "--max-model-len", str(MAX_MODEL_LEN)
    with quire_server(folder, *options) as server:
        figures = measure("quire", server)
    if arguments.peers is not None:
        with vllm_server(folder, arguments.peers, *options) as server:
            figures |= measure("vllm", server)
    return figures


if __name__ == "__main__":
    main()
