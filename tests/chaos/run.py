"""One run of chaos: a server under work and faults, its answers, its leaks and its times of recovery."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from tcp_proxy import tcp_proxy

from quire import AsyncClient, SamplingParams
from quire.cluster.demo.server import ServerProcess, shared_memory_of
from quire.proto.errors import QuireError

from .faults import FAULTS, Target
from .work import Answer, Doors, Job, Tally, make_jobs, run_job

OPTIONS = "demo", "--tensor-parallel-size", "2", "--audit"
READY_TIMEOUT_S = 180.0
RECOVERY_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 60.0
# Requests that run at once.
NUM_AT_ONCE = 12
# Descriptors that a gateway opens once and keeps: connections of its pools, files that it reads again.
DESCRIPTOR_SLACK = 12


@dataclass(slots=True)
class Report:
    """The outcome of a run.

    Attributes:
        recovery_s: kind of fault |-> times until a new request was answered.
    """

    tally: Tally = field(default_factory=Tally)
    leaks: list[str] = field(default_factory=list)
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_faults: int = 0


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that a server's processes hold while it is idle."""

    num_processes: int
    num_descriptors: int
    num_shared_memories: int

    @staticmethod
    def of(server: ServerProcess) -> Resources:
        gateway = psutil.Process(server.process.pid)
        pids = [gateway.pid, *(child.pid for child in gateway.children(recursive=True))]
        shared = {path for path in shared_memory_of(pids) if path.exists()}
        return Resources(len(pids), len(list(Path(f"/proc/{gateway.pid}/fd").iterdir())), len(shared))

    def leaks_since(self, before: Resources) -> list[str]:
        """Describe what is held beside what was held before."""
        more = {
            "processes": self.num_processes - before.num_processes,
            "descriptors": self.num_descriptors - before.num_descriptors - DESCRIPTOR_SLACK,
            "shared memories": self.num_shared_memories - before.num_shared_memories,
        }
        return [f"{count} {name} more than before" for name, count in more.items() if count > 0]


async def run(
    num_requests: int, num_faults: int, seed: int, kinds: tuple[str, ...] = tuple(FAULTS)
) -> Report:
    """Start a server, compare the work of two runs of it, one of them with faults, and look for leaks."""
    server = ServerProcess(*OPTIONS)
    try:
        await asyncio.to_thread(server.wait_ready, READY_TIMEOUT_S)
        async with (
            tcp_proxy(server.address) as proxy,
            AsyncClient(server.address) as observer,
            AsyncClient(proxy.address) as client,
            httpx.AsyncClient(base_url=server.http_url, timeout=READY_TIMEOUT_S) as http,
        ):
            rng, report = random.Random(seed), Report()
            doors, jobs = Doors(client, http), make_jobs(num_requests, rng)
            expected = await _undisturbed(doors, jobs)
            before = Resources.of(server)
            target = Target(server, observer, proxy, rng)
            working = asyncio.ensure_future(_work(doors, jobs, expected, report.tally))
            await _make_faults(target, observer, num_faults, kinds, rng, report, working)
            await working
            report.leaks += await _held_when_idle(observer)
            report.leaks += Resources.of(server).leaks_since(before)
        status = await asyncio.to_thread(server.stop)
        report.leaks += await asyncio.to_thread(server.leftovers)
        report.leaks += [] if status == 0 else [f"the server ended with exit status {status}"]
        return report
    finally:
        await asyncio.to_thread(server.close)


async def _undisturbed(doors: Doors, jobs: list[Job]) -> dict[Job, Answer]:
    """Return the answer of each different job, one after the other."""
    return {job: await doors.answer(job) for job in dict.fromkeys(jobs)}


async def _work(doors: Doors, jobs: list[Job], expected: dict[Job, Answer], tally: Tally) -> None:
    slots = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(number: int, job: Job) -> None:
        async with slots:
            await run_job(doors, job, number, expected, tally)

    await asyncio.gather(*(one(number, job) for number, job in enumerate(jobs)))


async def _make_faults(
    target: Target,
    observer: AsyncClient,
    num_faults: int,
    kinds: tuple[str, ...],
    rng: random.Random,
    report: Report,
    working: asyncio.Future[None],
) -> None:
    """Cause the faults one after the other while there is work; each kind as often as the others."""
    for number in range(num_faults):
        if working.done():
            return
        kind = kinds[number % len(kinds)]
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        started = time.monotonic()
        await FAULTS[kind](target)
        await _until_answered(observer)
        report.recovery_s[kind].append(time.monotonic() - started)
        report.num_faults += 1


async def _until_answered(observer: AsyncClient) -> None:
    """Return once a new request has got its one token."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        while True:
            try:
                await observer.generate("It", params, timeout_s=RECOVERY_TIMEOUT_S)
                return
            except QuireError:
                await asyncio.sleep(0.05)


async def _held_when_idle(observer: AsyncClient) -> list[str]:
    """Describe the blocks and rows that are held after all work; waits for the last aborts."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        (replica,) = await observer.status()
        held = {
            "blocks": replica.kv.num_used_blocks,
            "running sequences": replica.queue.num_running,
            "waiting sequences": replica.queue.num_waiting,
        }
        left = [f"{count} {name}" for name, count in held.items() if count]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)
