"""Prompts with images over HTTP: `quire serve`, and vLLM's server with the same client, model and prompts.

    python -m benchmarks.image_servers --peers DIR --json benchmarks/results/image_servers.json

DIR has the environments of `benchmarks.peers.install`. The model, the files and what is measured of them are those of
`benchmarks.images`. The servers take turns with the same prompts, one image after the other, since other processes
share the machine; vLLM's processes are stopped meanwhile. A server that does not start is left out, with the reason
in a figure. Both compute on the cores of this process, which `taskset` may limit.

With --processor-time all times are the processor time of a server's processes, for a machine that has other work:
then run on one core, since threads that wait use time, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx

from benchmarks.common import Figure, make_parser, report
from benchmarks.http_servers import Server, quire_server, vllm_server
from benchmarks.images import (
    CALL_TIMEOUT_S,
    NUM_FIRST_TOKENS,
    NUM_ROUNDS,
    OPTIONS,
    WARM_UP,
    Caller,
    FirstTokens,
    Rate,
    named,
)
from benchmarks.peers.process import pause_children, processor_s, resume_children
from benchmarks.random_models import make_vision_model


async def take_turns(
    servers: Mapping[str, Server], *, counts_processor_time: bool = False
) -> dict[str, Figure]:
    """Measure servers that are ready, one image after the other; each is warmed up before its turn."""
    # Connections that a server closes while it is stopped would fail later.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    found = {name: (FirstTokens(), Rate()) for name in servers}

    async def turn(server: Server, measure: Callable[[Caller], Awaitable[None]]) -> None:
        clock = partial(processor_s, server.pid) if counts_processor_time else time.perf_counter
        with awake(server):
            async with httpx.AsyncClient(
                base_url=server.url, timeout=CALL_TIMEOUT_S, limits=limits
            ) as client:
                caller = Caller(client, server.model, clock)
                await caller.call(WARM_UP)
                await measure(caller)

    for server in servers.values():
        stop(server)
    for _ in range(NUM_FIRST_TOKENS):
        for name, server in servers.items():
            await turn(server, found[name][0].measure)
    for _ in range(NUM_ROUNDS):
        for name, server in servers.items():
            await turn(server, found[name][1].measure)
    figures: dict[str, Figure] = {}
    for name, (first_tokens, rate) in found.items():
        figures |= named(f"image_servers.{name}", first_tokens.figures() | rate.figures())
    return figures


@contextmanager
def awake(server: Server) -> Iterator[None]:
    """Let a server run, and stop it again."""
    if server.spins:
        resume_children(server.pid)
    try:
        yield
    finally:
        stop(server)


def stop(server: Server) -> None:
    """Stop a server's processes if they use the processor while they wait."""
    if server.spins:
        pause_children(server.pid)


def measure_peers(folder: Path, peers: Path, *, counts_processor_time: bool = False) -> dict[str, Figure]:
    """Measure quire and vLLM; a server that does not start is left out, with the reason in its figure."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    variables = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1"}
    # vLLM would plan for prompts of many images.
    of_vllm = "--limit-mm-per-prompt", json.dumps({"image": 1, "video": 0})
    starts: dict[str, AbstractContextManager[Server]] = {
        "quire": quire_server(folder, *OPTIONS),
        "vllm": vllm_server(folder, peers, *OPTIONS, *of_vllm, variables=variables),
    }
    servers: dict[str, Server] = {}
    failed: dict[str, Figure] = {}
    with ExitStack() as stack:
        for name, start in starts.items():
            started = time.perf_counter()
            try:
                servers[name] = stack.enter_context(start)
            except RuntimeError as error:
                spent_s = time.perf_counter() - started
                failed[f"image_servers.{name}.failed_after_s"] = Figure(spent_s, "s", str(error))
        return failed | asyncio.run(take_turns(servers, counts_processor_time=counts_processor_time))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR", help="has vLLM's environment")
    parser.add_argument("--processor-time", action="store_true", help="measure processor time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-images-") as name:
        folder = Path(name) / "vision"
        make_vision_model(folder)
        counts = arguments.processor_time
        figures = measure_peers(folder, arguments.peers, counts_processor_time=counts)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
