"""Streamed tokens per second and added latency of a gateway, without a model.

    python -m benchmarks.gateway --json benchmarks/results/gateway.json

A stand-in for a replica sends a token per sequence and step at a given rate, as TokenBatches over ZeroMQ. Gateways
with the real services, and one client, run in processes of their own. A token's id tells the step that sampled it,
and the time of each step is in shared memory: so the client knows how long each token took from the scheduler to its
own loop.

Throughput is measured at a rate that the gateway cannot keep up with: updates merge, as they do for slow clients. The
latency is measured at STEADY_RATE steps per second. With two gateways, both listen on one port (SO_REUSEPORT).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import psutil

from benchmarks.common import Figure, make_parser, names_from, report
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.admin.services import GatewayServices
from quire.cluster.gateway.grpc.server import Gateway
from quire.cluster.gateway.http.server import HttpServer
from quire.cluster.gateway.routing.served_models import serve_single_replica
from quire.cluster.os_utils.event_loop import run_event_loop
from quire.cluster.text.requests.tokenizer import Tokenizer
from quire.proto import inference_pb2, inference_pb2_grpc
from quire.proto.replica_status import ReplicaStatus
from quire.proto.stream import Abort, Finish, FinishReason, StatusQuery, Submit, TokenBatch
from quire.scheduler.service.zmq_mailbox import ZmqMailbox

NUM_STREAMS = (1, 64, 256, 1024)
STEADY_RATE = 20.0
# Tokens per second that saturate any gateway, and most steps per second of the stand-in.
SATURATING_TOKENS_PER_S, MAX_RATE = 300_000.0, 1000.0
# Token ids that carry step numbers: ordinary tokens of the demo model.
FIRST_ID, NUM_IDS = 300, 200
# Rate at which a stand-in without steps looks for a new rate, and the most that it makes up for.
IDLE_RATE, MAX_LAG_S = 10.0, 0.1
START_TIMEOUT_S = 180.0
WARM_UP_S = 1.0
# A merged chunk of server-sent events is one line.
MAX_LINE_BYTES = 16 << 20


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    parser.add_argument("--doors", type=names_from(("grpc", "http")), default=["grpc", "http"])
    parser.add_argument("--streams", type=int, nargs="+", default=list(NUM_STREAMS))
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--role", choices=("replica", "gateway", "client"), help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is not None:
        run_role(arguments.role, json.loads(arguments.job))
        return
    figures: dict[str, Figure] = {}
    for num_gateways in arguments.gateways:
        with servers(num_gateways) as site:
            if num_gateways == 1:  # first: memory that load has left free would be used again
                figures["gateway.grpc.idle_stream_bytes"] = measure_idle_streams(site, 1024)
            for door in arguments.doors if num_gateways == 1 else ["grpc"]:
                for num_streams in arguments.streams:
                    name = f"gateway.{door}.{num_streams}" + ("" if num_gateways == 1 else ".two_gateways")
                    figures |= measure(site, name, door, num_streams, arguments.seconds)
    report(figures, arguments.json)


@dataclass
class Site:
    """Running servers.

    Attributes:
        times: file of the steps' times; the entry after them is the stand-in's steps per second.
        target, url: of the gRPC servers, which share a port, and of the last HTTP server.
        gateway: process of the first gateway.
    """

    times: str
    target: str
    url: str
    gateway: psutil.Process

    def client_job(self, door: str, num_streams: int, rate: float, seconds: float) -> dict[str, Any]:
        return {
            "times": self.times, "target": self.target, "url": self.url,
            "door": door, "num_streams": num_streams, "rate": rate, "seconds": seconds,
        }  # fmt: skip


def measure(site: Site, name: str, door: str, num_streams: int, seconds: float) -> dict[str, Figure]:
    """Return the throughput and the added latency at this number of streams."""
    rate = min(MAX_RATE, SATURATING_TOKENS_PER_S / num_streams)
    cpu_s = sum(site.gateway.cpu_times()[:2])
    saturated = json.loads(run("client", site.client_job(door, num_streams, rate, seconds)))
    cpu_s = sum(site.gateway.cpu_times()[:2]) - cpu_s
    steady = json.loads(run("client", site.client_job(door, num_streams, STEADY_RATE, seconds)))
    chunks_per_s = saturated["chunks_per_s"] / num_streams
    note = (
        f"{rate:.0f} steps/s of one token per stream; {chunks_per_s:.0f} chunks/s per stream; "
        f"{cpu_s:.1f} s of CPU in the gateway"
    )
    return {
        f"{name}.tokens_per_s": Figure(saturated["tokens_per_s"], "tokens/s", note),
        f"{name}.added_ms_p50": Figure(steady["added_ms_p50"], "ms", f"{STEADY_RATE:.0f} steps/s"),
        f"{name}.added_ms_p99": Figure(steady["added_ms_p99"], "ms", f"{STEADY_RATE:.0f} steps/s"),
    }


def measure_idle_streams(site: Site, num_streams: int) -> Figure:
    """Return the memory that a gateway takes for each open stream that gets no token."""
    before = site.gateway.memory_info().rss
    client = start("client", site.client_job("grpc", num_streams, 0.0, -1.0))
    try:
        read_line(client)
        used = site.gateway.memory_info().rss - before
    finally:
        end(client)
    return Figure(used / num_streams, "bytes", f"{num_streams} streams")


@contextmanager
def servers(num_gateways: int) -> Iterator[Site]:
    """Run a replica and gateways."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        times = str(Path(folder) / "times")
        np.zeros(NUM_IDS + 1).tofile(times)
        processes = [start("replica", {"folder": folder, "times": times})]
        try:
            address = read_line(processes[0])
            target, url = "127.0.0.1:0", ""
            for _ in range(num_gateways):
                job = {"address": address, "listen": target, "reuse": num_gateways > 1}
                processes.append(start("gateway", job))
                target, url = read_line(processes[-1]).split()
            yield Site(times, target, url, psutil.Process(processes[1].pid))
        finally:
            for process in reversed(processes):
                end(process)


def start(role: str, job: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gateway", "--role", role, "--job", json.dumps(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run(role: str, job: dict[str, Any]) -> str:
    process = start(role, job)
    try:
        return read_line(process)
    finally:
        end(process)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, f"process {process.pid} ended"
    return line


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def run_role(role: str, job: dict[str, Any]) -> None:
    if role == "replica":
        run_replica(**job)
    elif role == "gateway":
        run_event_loop(run_gateway(**job))
    else:
        run_event_loop(run_clients(**job))


def run_replica(folder: str, times: str) -> None:
    """Serve requests with a token per step, at the rate that is in the file, and record the time of each step."""
    step_times = np.memmap(times, np.float64, "r+")
    mailbox = ZmqMailbox(f"ipc://{folder}/replica")
    print(mailbox.endpoint, flush=True)
    running: dict[bytes, list[int]] = {}
    step, due = 0, time.monotonic()
    while True:
        for gateway, message in mailbox.receive(max(0.0, due - time.monotonic())):
            on_message(mailbox, gateway, message, running)
        if time.monotonic() < due:
            continue
        rate = float(step_times[NUM_IDS])
        due = max(due + 1 / (rate or IDLE_RATE), time.monotonic() - MAX_LAG_S)
        if not rate:
            continue
        step += 1
        step_times[step % NUM_IDS] = time.monotonic()
        for gateway, handles in running.items():
            if handles:
                ids = np.full(len(handles), FIRST_ID + step % NUM_IDS, np.int32)
                mailbox.send(gateway, TokenBatch(step, np.array(handles, np.int32), ids))


def on_message(mailbox: ZmqMailbox, gateway: bytes, message: object, running: dict[bytes, list[int]]) -> None:
    handles = running.setdefault(gateway, [])
    if isinstance(message, Submit) and message.sampling.max_tokens == 1:  # the canary
        done = Finish(message.handle, FinishReason.LENGTH, num_completion_tokens=1)
        token = np.array([message.handle], np.int32), np.array([FIRST_ID], np.int32)
        mailbox.send(gateway, TokenBatch(1, *token, finished=(done,)))
    elif isinstance(message, Submit):
        handles.append(message.handle)
    elif isinstance(message, Abort) and message.handle in handles:
        handles.remove(message.handle)
    elif isinstance(message, StatusQuery):
        mailbox.send(gateway, status(message.query_id))


def status(query_id: int) -> ReplicaStatus:
    return ReplicaStatus("replica-0", "demo", query_id=query_id, block_size=16, num_blocks=64)


async def run_gateway(address: str, listen: str, reuse: bool) -> None:
    """Serve on a port of the system's choice, or on one that another gateway has already."""
    config = resolve(EngineOptions("demo", device="cpu", num_kv_blocks=64), Machine.this())
    replica = ReplicaClient(address, "replica-0")
    replica.start()
    services = GatewayServices.compose(serve_single_replica(config, Tokenizer(config.model.path), replica))
    gateway, http = Gateway(services, listen, reuse_port=reuse), HttpServer(services)
    target, url = await gateway.start(), await http.start()
    async with asyncio.timeout(START_TIMEOUT_S):
        await gateway.wait_ready()
    print(target, url, flush=True)
    await asyncio.Event().wait()


async def run_clients(
    door: str, num_streams: int, rate: float, seconds: float, times: str, target: str, url: str
) -> None:
    """Read streams, and print what was measured; with negative `seconds` only open them, until killed."""
    step_times = np.memmap(times, np.float64, "r+")
    step_times[NUM_IDS] = 0.0  # no step before every stream is open
    meter = Meter(step_times)
    open_stream = grpc_stream(target) if door == "grpc" else http_stream(url)
    tasks = [asyncio.create_task(meter.read(open_stream())) for _ in range(num_streams)]
    async with asyncio.timeout(START_TIMEOUT_S):
        while meter.num_started < num_streams:
            await asyncio.sleep(0.01)
    if seconds < 0:
        print("open", flush=True)
        await asyncio.Event().wait()
    step_times[NUM_IDS] = rate
    await asyncio.sleep(WARM_UP_S)
    meter.reset()
    started = time.monotonic()
    await asyncio.sleep(seconds)
    figures = meter.figures(time.monotonic() - started)
    step_times[NUM_IDS] = 0.0
    print(json.dumps(figures), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Meter:
    """Counts tokens and chunks, and the time since the step of each chunk's first token."""

    def __init__(self, step_times: np.ndarray[Any, Any]) -> None:
        self._step_times = step_times
        self.num_started = 0
        self.reset()

    def reset(self) -> None:
        self._num_tokens = 0
        self._added_s: list[float] = []

    async def read(self, stream: AsyncIterator[list[int]]) -> None:
        async for token_ids in stream:
            if not token_ids:  # the stream has started
                self.num_started += 1
                continue
            now = time.monotonic()
            self._num_tokens += len(token_ids)
            self._added_s.append(now - float(self._step_times[token_ids[0] - FIRST_ID]))

    def figures(self, elapsed_s: float) -> dict[str, float]:
        added = sorted(self._added_s) or [0.0]
        return {
            "tokens_per_s": self._num_tokens / elapsed_s,
            "chunks_per_s": len(self._added_s) / elapsed_s,
            "added_ms_p50": 1e3 * statistics.median(added),
            "added_ms_p99": 1e3 * added[int(0.99 * len(added))],
        }


def grpc_stream(target: str) -> Any:
    """Return a function that opens a stream; yields an empty list at its start, then the tokens of each delta."""
    # With one connection, one of two gateways would serve all streams.
    channels = [grpc.aio.insecure_channel(target, (("grpc.channel_id", index),)) for index in range(8)]
    count = iter(range(1 << 30))

    async def stream() -> AsyncIterator[list[int]]:
        stub: Any = inference_pb2_grpc.InferenceStub(channels[next(count) % len(channels)])
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[FIRST_ID]),
            sampling=inference_pb2.SamplingParams(max_tokens=2000, ignore_eos=True),
        )
        async for event in stub.GenerateStream(request):
            yield list(event.delta.token_ids)

    return stream


def http_stream(url: str) -> Any:
    """Return a function that opens a stream of server-sent events; see `grpc_stream`."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps(
        {
            "prompt": [FIRST_ID],
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()

    async def stream() -> AsyncIterator[list[int]]:
        reader, writer = await asyncio.open_connection(host, int(port), limit=MAX_LINE_BYTES)
        writer.write(request)
        await reader.readuntil(b"\r\n\r\n")
        yield []
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                token_ids = json.loads(line[6:])["choices"][0].get("token_ids")
                if token_ids:
                    yield token_ids

    return stream


if __name__ == "__main__":
    main()
