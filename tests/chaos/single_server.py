"""SingleServer: `quire serve` with two ranks, behind a proxy."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import signal
import tempfile
from collections.abc import Awaitable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import httpx
import psutil
from server_processes import processes_with
from tcp_proxy import TcpProxy, tcp_proxy

from quire import AsyncClient, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.config.engine_options import DEMO_MODEL_PATH
from quire.proto.errors import QuireError, RequestQuarantined
from quire.proto.faults import Fault as InjectedFault
from quire.proto.faults import FaultKind

from .adapter import adapter_options, adapter_path
from .doors import Door
from .jobs import ADAPTER
from .machine import Clock, Disk, environment, own_disk, short_of_memory
from .site import READY_TIMEOUT_S, RECOVERY_TIMEOUT_S, Fault, Resources, until_answered

OPTIONS = "demo", "--tensor-parallel-size", "2", "--audit", "--enable-chaos"
NUM_RANKS = 2
CLOCK_JUMPS_S = -86_400, -3600, 7, 3600, 86_400
POISON_S = 30.0

_log = logging.getLogger(__name__)


class SingleServer:
    """See Site.

    Args:
        rng: of the details of faults.
        has_clock: its wall clock can jump.
    """

    def __init__(self, rng: random.Random, *, has_clock: bool = True) -> None:
        self.server: ServerProcess
        self.observer: AsyncClient
        self.doors: list[Door] = []
        self._rng = rng
        self._has_clock = has_clock
        self._disk: Disk | None = None
        self._clock: Clock | None = None
        self._grpc_proxy: TcpProxy
        self._http_proxy: TcpProxy
        self._before = ExitStack()
        self._connections = AsyncExitStack()
        self._poison = 0
        self._names = (f"chaos-{number}" for number in itertools.count())
        self._adapter: tuple[str, ...] = ()
        self.faults: dict[str, Fault] = {
            "kill": self._kill_rank,
            "stop": self._stop_rank,
            "late": self._continue_rank_late,
            "exception": self._raise_in_rank,
            "poison": self._poison_request,
            "slow": self._slow_rank,
            "memory": self._exhaust_memory,
            "adapter": self._load_adapter,
            "weights": self._update_weights,
            "scheduler": self._kill_scheduler,
            "pause": self._pause_scheduler,
            "connection": self._break_connections,
            "delay": self._delay_network,
            "partition": self._cut_network,
        }

    async def start(self) -> None:
        """Start the server and wait until it is ready."""
        self._disk = self._before.enter_context(own_disk())
        variables = {}
        if self._has_clock:
            self._clock = Clock(Path(self._before.enter_context(tempfile.TemporaryDirectory())))
            variables = self._clock.environment
            self.faults["clock"] = self._jump
        if self._disk is not None:
            self.faults["disk"] = self._fill_disk
        self._adapter = adapter_options(self._before)
        with environment(variables):
            self.server = ServerProcess(*OPTIONS, *self._adapter)
        self._before.callback(self.server.close)
        await asyncio.to_thread(self.server.wait_ready, READY_TIMEOUT_S)
        enter = self._connections.enter_async_context
        self._grpc_proxy = await enter(tcp_proxy(self.server.address))
        self._http_proxy = await enter(tcp_proxy(self.server.http_url.removeprefix("http://")))
        # Without deadlines: gRPC compares its own clock with Python's, and only that jumps in `machine.Clock`.
        self.observer = await enter(AsyncClient(self.server.address, timeout_s=None))
        client = await enter(AsyncClient(self._grpc_proxy.address, timeout_s=None))
        http = await enter(
            httpx.AsyncClient(base_url=f"http://{self._http_proxy.address}", timeout=READY_TIMEOUT_S)
        )
        self.doors.append(Door(client, [http]))

    def choose_poison(self, used_token_ids: set[int]) -> None:
        """Choose a token that no other request has."""
        self._poison = min(set(range(1, len(used_token_ids) + 2)) - used_token_ids)

    def resources(self) -> Resources:
        gateway = psutil.Process(self.server.process.pid)
        return Resources.of([gateway], gateway.children(recursive=True))

    async def until_settled(self) -> None:
        await until_answered(self.observer)

    async def close(self) -> list[str]:
        await self._connections.aclose()
        left = []
        if hasattr(self, "server"):
            status = await asyncio.to_thread(self.server.stop)
            left = await asyncio.to_thread(self.server.leftovers)
            _log.info("the server's log:\n%s", self.server.log)
            if status:
                left.append(f"the server ended with exit status {status}")
        self._before.close()
        return left

    async def _kill_rank(self) -> None:
        os.kill(await self._a_rank(), signal.SIGKILL)

    async def _stop_rank(self) -> None:
        """Stop a rank for good."""
        os.kill(await self._a_rank(), signal.SIGSTOP)

    async def _continue_rank_late(self) -> None:
        """Stop a rank; it continues before or after it was given up."""
        pid = await self._a_rank()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(0.1, 3.0))
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    async def _raise_in_rank(self) -> None:
        await self._inject(InjectedFault(FaultKind.EXCEPTION))

    async def _slow_rank(self) -> None:
        """Delay the steps of a rank, by less or more than makes a step late."""
        delay_s = self._rng.choice((0.05, 0.3, 1.0))
        await self._inject(InjectedFault(FaultKind.SLOW, delay_s=delay_s, duration_s=2.0))

    async def _poison_request(self) -> None:
        """Send a request that fails every step that begins it. It ends with its own error, the others go on."""
        await self._inject(InjectedFault(FaultKind.POISON, duration_s=POISON_S, token_id=self._poison))
        try:
            await self.observer.generate([self._poison] * 3)
        except RequestQuarantined:
            return
        except QuireError as error:
            raise AssertionError(f"the poisoned request ended with {error!r}") from error

    async def _exhaust_memory(self) -> None:
        with short_of_memory(await self._a_rank()):
            await asyncio.sleep(self._rng.uniform(0.5, 1.5))

    async def _load_adapter(self) -> None:
        """Kill a rank while the ranks load an adapter, or not. The adapter is there afterwards, or a clear error."""
        name = next(self._names)
        loading = self.observer.load_lora(name, adapter_path(self._adapter))
        if not await self._succeeds("a load of an adapter", loading):
            return
        prompt, params = "It was", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        loaded = await self.observer.generate(prompt, params, model=name)
        expected = await self.observer.generate(prompt, params, model=ADAPTER)
        if loaded.outputs[0].token_ids != expected.outputs[0].token_ids:
            raise AssertionError("an adapter that was loaded under a fault changes the tokens")
        await self.observer.unload_lora(name)

    async def _update_weights(self) -> None:
        """Kill a rank while the ranks read the same weights again, or not."""
        updating = self.observer.update_weights(str(DEMO_MODEL_PATH), version=next(self._names))
        await self._succeeds("an update of the weights", updating)

    async def _succeeds(self, what: str, command: Awaitable[None]) -> bool:
        """Run a command of all ranks, half of the times while one is killed, and return whether it succeeded."""
        running = asyncio.ensure_future(command)
        is_harmed = self._rng.random() < 0.5
        if is_harmed:
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            await self._kill_rank()
        try:
            async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                await running
        except QuireError as error:
            if not is_harmed:
                raise AssertionError(f"{what} ended with {error!r}") from error
            _log.info("%s ended with %r", what, error)
            return False
        return True

    async def _kill_scheduler(self) -> None:
        (scheduler,) = processes_with("SchedulerActor", self.server.process.pid)
        scheduler.kill()

    async def _pause_scheduler(self) -> None:
        (scheduler,) = processes_with("SchedulerActor", self.server.process.pid)
        scheduler.suspend()
        await asyncio.sleep(self._rng.uniform(0.1, 1.5))
        scheduler.resume()

    async def _break_connections(self) -> None:
        """Reset every connection of the clients, without the bytes that are on their way."""
        for proxy in (self._grpc_proxy, self._http_proxy):
            proxy.break_connections()

    async def _delay_network(self) -> None:
        """Delay each packet by another time, as a network that loses packets and repeats them."""
        for proxy in (self._grpc_proxy, self._http_proxy):
            proxy.delay_s = lambda: self._rng.expovariate(20)
        await asyncio.sleep(self._rng.uniform(0.5, 2.0))
        for proxy in (self._grpc_proxy, self._http_proxy):
            proxy.delay_s = None

    async def _cut_network(self) -> None:
        """Let nothing through; connections stay open."""
        for proxy in (self._grpc_proxy, self._http_proxy):
            proxy.hold()
        await asyncio.sleep(self._rng.uniform(0.5, 5.0))
        for proxy in (self._grpc_proxy, self._http_proxy):
            proxy.release()

    async def _fill_disk(self) -> None:
        """Let a rank die while the disk is full."""
        assert self._disk is not None
        self._disk.fill()
        try:
            if self._rng.random() < 0.5:
                await self._kill_rank()
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))
        finally:
            self._disk.free()

    async def _jump(self) -> None:
        assert self._clock is not None
        self._clock.jump(self._rng.choice(CLOCK_JUMPS_S))
        await asyncio.sleep(self._rng.uniform(0.1, 1.0))

    async def _inject(self, fault: InjectedFault) -> None:
        await self.observer.inject_fault(fault, rank=self._rng.randrange(NUM_RANKS))

    async def _a_rank(self) -> int:
        (replica,) = await self.observer.status()
        return self._rng.choice(replica.ranks).pid
