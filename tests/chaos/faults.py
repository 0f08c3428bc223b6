"""Faults of a running server: its processes are killed and stopped, its clients' connections broken."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable

import psutil
from tcp_proxy import TcpProxy

from quire import AsyncClient
from quire.cluster.demo.server import ServerProcess


class Target:
    """A running server and the ways to harm it."""

    def __init__(
        self, server: ServerProcess, client: AsyncClient, proxy: TcpProxy, rng: random.Random
    ) -> None:
        self._server = server
        self._client = client
        self._proxy = proxy
        self._rng = rng

    async def kill_rank(self) -> None:
        os.kill(await self._a_rank(), signal.SIGKILL)

    async def stop_rank(self) -> None:
        """Stop a rank for good."""
        os.kill(await self._a_rank(), signal.SIGSTOP)

    async def continue_rank_late(self) -> None:
        """Stop a rank; it continues before or after it was given up."""
        pid = await self._a_rank()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(0.1, 3.0))
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    async def kill_scheduler(self) -> None:
        os.kill(self._scheduler().pid, signal.SIGKILL)

    async def pause_scheduler(self) -> None:
        scheduler = self._scheduler()
        scheduler.suspend()
        await asyncio.sleep(self._rng.uniform(0.1, 1.5))
        scheduler.resume()

    async def break_connections(self) -> None:
        """Reset every connection of the gRPC clients, without the bytes that are on their way."""
        self._proxy.break_connections()

    def _scheduler(self) -> psutil.Process:
        children = psutil.Process(self._server.process.pid).children(recursive=True)
        (found,) = [each for each in children if "SchedulerActor" in " ".join(each.cmdline())]
        return found

    async def _a_rank(self) -> int:
        (replica,) = await self._client.status()
        return self._rng.choice(replica.ranks).pid


Fault = Callable[[Target], Awaitable[None]]
FAULTS: dict[str, Fault] = {
    "kill": Target.kill_rank,
    "stop": Target.stop_rank,
    "late": Target.continue_rank_late,
    "scheduler": Target.kill_scheduler,
    "pause": Target.pause_scheduler,
    "connection": Target.break_connections,
}
