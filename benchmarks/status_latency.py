"""Seconds in which a server answers for its state while a process hangs.

    python -m benchmarks.status_latency --json benchmarks/results/status_latency.json

Stops a process by SIGSTOP while a stream runs on `quire serve demo` with two ranks: a rank, the scheduler, or another
gateway that has a stream there too. Meanwhile it asks again and again for the status over gRPC, for the health over
gRPC, and for ``/health``, ``/ready`` and ``/metrics`` over HTTP. Exit status 1 if an answer took more than 0.5 s.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import psutil

from benchmarks.common import Figure, make_parser, report
from quire import AsyncClient, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess

READY_TIMEOUT_S = 300.0
# The goal: an answer takes less, whatever hangs.
GOAL_S = 0.5
INTERVAL_S = 0.05
PATHS = "/health", "/ready", "/metrics"
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True, temperature=0.0)

Query = Callable[[], Awaitable[object]]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for which each process is stopped")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.seconds))
    report(figures, arguments.json)
    return any(figure.value > GOAL_S for figure in figures.values())


async def measure(seconds: float) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    server = ServerProcess("demo", "--tensor-parallel-size", "2")
    try:
        await asyncio.to_thread(server.wait_ready, READY_TIMEOUT_S)
        async with (
            AsyncClient(server.address) as client,
            httpx.AsyncClient(base_url=server.http_url, timeout=READY_TIMEOUT_S) as http,
        ):
            queries: dict[str, Query] = {"status": client.status, "grpc_health": client.is_ready}
            queries |= {path.strip("/"): _get(http, path) for path in PATHS}
            await client.generate("It was", SamplingParams(max_tokens=8))
            (replica,) = await client.status()
            async with gateway_peer(server, replica.replica_id) as peer_pid:
                pids = {
                    "nothing": 0,
                    "gateway": peer_pid,
                    "scheduler": scheduler_pid(server),
                    "rank": replica.ranks[1].pid,
                }
                for name, pid in pids.items():
                    async with running_stream(client), stopped(pid):
                        figures |= await measure_queries(name, queries, seconds)
                    await client.generate("It was", SamplingParams(max_tokens=8))
        await asyncio.to_thread(server.stop)
    finally:
        await asyncio.to_thread(server.close)
    return figures


def _get(http: httpx.AsyncClient, path: str) -> Query:
    return lambda: http.get(path)


def scheduler_pid(server: ServerProcess) -> int:
    children = psutil.Process(server.process.pid).children(recursive=True)
    (pid,) = [each.pid for each in children if "SchedulerActor" in " ".join(each.cmdline())]
    return pid


@asynccontextmanager
async def gateway_peer(server: ServerProcess, replica_id: str) -> AsyncIterator[int]:
    """Run another gateway of the server's replica; yield its process id once its request runs."""
    (endpoint,) = server.temporary.glob(f"quire-*/{replica_id}")
    command = "-m", "benchmarks.gateway_peer", f"ipc://{endpoint}", replica_id
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await process.stdout.readline()
        yield process.pid
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """Stop a process during the block; 0 stops none. A process that was killed meanwhile is gone."""
    if not pid:
        yield
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            print(f"process {pid} was replaced", file=sys.stderr)


@asynccontextmanager
async def running_stream(client: AsyncClient) -> AsyncIterator[None]:
    task = asyncio.ensure_future(client.generate("It was", ENDLESS))
    try:
        yield
    finally:
        await task


async def measure_queries(name: str, queries: dict[str, Query], seconds: float) -> dict[str, Figure]:
    """Return the longest and the median time of each query, asked again and again for so long."""
    taken: dict[str, list[float]] = {query: [] for query in queries}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for query, ask in queries.items():
            asked_at = time.monotonic()
            await ask()
            taken[query].append(time.monotonic() - asked_at)
        await asyncio.sleep(INTERVAL_S)
    figures: dict[str, Figure] = {}
    for query, times in taken.items():
        prefix = f"status_latency.{name}.{query}"
        figures[f"{prefix}.max_s"] = Figure(max(times), "s", f"{name} stopped, {len(times)} times asked")
        figures[f"{prefix}.p50_s"] = Figure(statistics.median(times), "s")
    return figures


if __name__ == "__main__":
    sys.exit(main())
