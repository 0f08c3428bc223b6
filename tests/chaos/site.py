"""Site: servers under work, the ways to harm them, and the resources that they must not leak."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil
from server_processes import command_of

from quire import AsyncClient, SamplingParams
from quire.cluster.cli.demo.server import shared_memory_of
from quire.proto.errors import QuireError

from .doors import Door

READY_TIMEOUT_S = 240.0
RECOVERY_TIMEOUT_S = 240.0
IDLE_TIMEOUT_S = 120.0
# Descriptors that a gateway opens once and keeps: connections of its pools, files that it reads again.
DESCRIPTOR_SLACK = 12
PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

Fault = Callable[[], Awaitable[None]]


class Site(Protocol):
    """Servers under work.

    Attributes:
        doors: their clients.
        observer: a client through which no fault reaches.
        faults: kind |-> causes the fault. Kinds that this machine does not permit are missing.
    """

    @property
    def doors(self) -> Sequence[Door]: ...

    @property
    def observer(self) -> AsyncClient: ...

    @property
    def faults(self) -> Mapping[str, Fault]: ...

    async def start(self) -> None:
        """Start the servers and wait until they are ready."""
        ...

    def choose_poison(self, used_token_ids: set[int]) -> None:
        """Choose a token for poisoned requests that no other request has."""
        ...

    def resources(self) -> Resources:
        """Return the resources that the servers hold now."""
        ...

    async def until_settled(self) -> None:
        """Return once all replicas are ready again."""
        ...

    async def close(self) -> list[str]:
        """End the servers, also those of a start that failed; describe what they leave."""
        ...


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that servers hold.

    Attributes:
        num_bytes: resident memory of the gateways and the schedulers.
    """

    num_processes: int
    num_threads: int
    num_descriptors: int
    num_shared_memories: int
    num_bytes: int

    @staticmethod
    def of(gateways: Sequence[psutil.Process], others: Sequence[psutil.Process]) -> Resources:
        """Return the resources of gateways, and the processes and shared memory of their replicas.

        Processes that Ray keeps for later actors are as many as Ray likes, and no part of it.
        """
        processes = [*gateways, *(each for each in others if not is_spare(each))]
        schedulers = [each for each in others if "SchedulerActor" in command_of(each)]
        shared = {path for path in shared_memory_of(each.pid for each in processes) if path.exists()}
        return Resources(
            len(processes),
            sum(each.num_threads() for each in gateways),
            sum(each.num_fds() for each in gateways),
            len(shared),
            sum(each.memory_info().rss for each in (*gateways, *schedulers)),
        )

    def leaks_since(self, before: Resources) -> list[str]:
        """Describe what is held beside what was held before."""
        more = {
            "processes": self.num_processes - before.num_processes,
            "descriptors": self.num_descriptors - before.num_descriptors - DESCRIPTOR_SLACK,
            "shared memories": self.num_shared_memories - before.num_shared_memories,
        }
        return [f"{count} {name} more than before" for name, count in more.items() if count > 0]


async def until_answered(observer: AsyncClient, prompt: str = "It") -> None:
    """Return once a new request has got its one token. Raises TimeoutError if none does in RECOVERY_TIMEOUT_S."""
    latest: QuireError | None = None
    try:
        async with asyncio.timeout(RECOVERY_TIMEOUT_S):
            while True:
                try:
                    await observer.generate(prompt, PROBE)
                    return
                except QuireError as error:
                    latest = error
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(
            f"no answer in {RECOVERY_TIMEOUT_S:g} s; the latest error is {latest!r}"
        ) from latest


async def held_when_idle(observer: AsyncClient) -> list[str]:
    """Describe the blocks and rows that are held after all work; waits for the last aborts."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        left: list[str] = []
        for replica in await observer.status():
            held = {
                "blocks": replica.kv.num_used_blocks,
                "running sequences": replica.queue.num_running,
                "waiting sequences": replica.queue.num_waiting,
            }
            left += [f"{count} {name} of {replica.replica_id}" for name, count in held.items() if count]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)


def is_spare(process: psutil.Process) -> bool:
    """Return whether it is a process of Ray that executes nothing, or one that is being started for that."""
    command = command_of(process)
    return command.startswith("ray::IDLE") or "default_worker.py" in command
