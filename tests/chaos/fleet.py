"""FleetSite: two gateways of a fleet with two replicas, on two Ray nodes of this machine.

NetworkSite: the same with the second node in a network of its own, which is cut, loses packets and is slow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, ExitStack, suppress

import httpx
import psutil
from far_network import FarNetwork, open_network
from ray_nodes import LOOPBACK, RayNodes
from server_processes import processes_with

from quire import AsyncClient, ReplicaInfo
from quire.cluster.cli.demo.server import ServerProcess
from quire.proto.errors import QuireError
from quire.proto.faults import Fault as InjectedFault
from quire.proto.faults import FaultKind

from .adapter import adapter_options
from .doors import Door
from .machine import environment
from .site import READY_TIMEOUT_S, RECOVERY_TIMEOUT_S, Fault, Resources, until_answered

NUM_REPLICAS = NUM_GATEWAYS = 2
# A replica is a scheduler and one rank: each node has room for one replica.
NODE = {"CPU": 2}
DEPLOYED = (
    "demo", "--min-replicas", "2", "--max-replicas", "2", "--num-kv-blocks", "512", "--drain-grace-s", "0.5",
    "--kv-transfer", "--audit",
)  # fmt: skip
OPTIONS = *DEPLOYED, "--enable-chaos"
# Of the network between the nodes, and of a short time in which no node is given up.
LOSSES, RATES_BITS_PER_S = (0.02, 0.1, 0.3), (100_000, 1_000_000)
CUT_S, DISTURBED_S = (0.5, 12.0), (1.0, 5.0)
# After the order to drain the sequences leave, at the end of the grace period of 0.5 s, and are read.
MOVES_S = 0.3, 1.5
# For a replica to start again: on two busy cores 40 s, after the end of a node twice that.
SETTLED_TIMEOUT_S = 300.0

_log = logging.getLogger(__name__)


class _Gateway:
    """A gateway process with its clients; `door` leads to it, and after a fault to its successor.

    Args:
        other: continues the calls of this one when it has ended.
    """

    def __init__(self, other: _Gateway | None) -> None:
        self._other = other
        self.process: ServerProcess
        self.client: AsyncClient
        self.door: Door
        self._clients = AsyncExitStack()

    async def start(self, address: str, variables: dict[str, str], adapter: tuple[str, ...]) -> None:
        """Start the process, or another one after it was killed, and connect to it."""
        with environment(variables):
            self.process = ServerProcess(*OPTIONS, *adapter, "--address", address)
        await asyncio.to_thread(self.process.wait_ready, READY_TIMEOUT_S)
        servers = [self.process] if self._other is None else [self.process, self._other.process]
        enter = self._clients.enter_async_context
        self.client = await enter(AsyncClient(",".join(server.address for server in servers)))
        http = [
            await enter(httpx.AsyncClient(base_url=server.http_url, timeout=READY_TIMEOUT_S))
            for server in servers
        ]
        if hasattr(self, "door"):  # calls of the process that was killed go on with their clients
            self.door.connect(self.client, http)
        else:
            self.door = Door(self.client, http)

    async def close(self) -> int:
        await self._clients.aclose()
        status = await asyncio.to_thread(self.process.stop)
        await asyncio.to_thread(self.process.close)
        return status


class FleetSite:
    """See Site. The first gateway is the observer's and is never harmed.

    Args:
        rng: of the details of faults.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._near_ip = self._far_ip = LOOPBACK
        self._far_prefix: list[str] = []
        self._nodes: RayNodes
        self._second: subprocess.Popen[bytes]
        self._gateways: list[_Gateway] = []
        self._num_updates = 0
        self._before = ExitStack()
        self._adapter = adapter_options(self._before)
        self.faults: dict[str, Fault] = {
            "fleet-kill": self._of_replica(self._kill_rank),
            "fleet-stop": self._of_replica(self._stop_rank),
            "fleet-exception": self._of_replica(self._raise_in_rank),
            "fleet-scheduler": self._of_replica(self._kill_scheduler),
            "controller": self._kill_controller,
            "gateway": self._kill_gateway,
            "raylet": self._kill_raylet,
            "head": self._pause_head,
            "update": self._update,
            "transfer": self._kill_in_transfer,
        }

    @property
    def observer(self) -> AsyncClient:
        return self._gateways[0].client

    @property
    def doors(self) -> list[Door]:
        return [gateway.door for gateway in self._gateways]

    async def start(self) -> None:
        """Start the nodes and the gateways, and wait until both replicas are ready."""
        self._nodes = self._before.enter_context(await asyncio.to_thread(RayNodes, NODE, self._near_ip))
        self._add_second()
        for _ in range(NUM_GATEWAYS):
            self._gateways.append(_Gateway(self._gateways[0] if self._gateways else None))
            await self._start_gateway(self._gateways[-1])
        await self.until_settled()

    def _add_second(self) -> None:
        self._second = self._nodes.add(NODE, self._far_ip, self._far_prefix)

    async def _start_gateway(self, gateway: _Gateway) -> None:
        await gateway.start(self._nodes.address, self._nodes.environment, self._adapter)

    def choose_poison(self, used_token_ids: set[int]) -> None:
        """No fault of this site needs it."""

    def resources(self) -> Resources:
        actors = [process for name in ("SchedulerActor", "WorkerActor") for process in self._actors(name)]
        gateways = [psutil.Process(gateway.process.process.pid) for gateway in self._gateways]
        return Resources.of(gateways, actors)

    async def until_settled(self) -> None:
        async with asyncio.timeout(SETTLED_TIMEOUT_S):
            for gateway in self._gateways:
                while len(await _ready(gateway.client)) < NUM_REPLICAS:
                    if self._second.poll() is not None:  # its raylet ends if the head gave it up
                        self._add_second()
                    await asyncio.sleep(0.2)
        await until_answered(self.observer)

    async def close(self) -> list[str]:
        left = []
        for number, gateway in enumerate(self._gateways):
            if hasattr(gateway, "process") and (status := await gateway.close()):
                left.append(f"gateway {number} ended with exit status {status}")
        await asyncio.to_thread(self._before.close)
        return left

    def _of_replica(self, harm: Callable[[ReplicaInfo], Awaitable[None]]) -> Fault:
        async def fault() -> None:
            async with asyncio.timeout(SETTLED_TIMEOUT_S):
                while not (replicas := await _ready(self.observer)):  # an earlier fault took the last one
                    await asyncio.sleep(0.2)
            await harm(self._rng.choice(replicas))

        return fault

    async def _kill_rank(self, replica: ReplicaInfo) -> None:
        os.kill(replica.ranks[0].pid, signal.SIGKILL)

    async def _stop_rank(self, replica: ReplicaInfo) -> None:
        os.kill(replica.ranks[0].pid, signal.SIGSTOP)

    async def _raise_in_rank(self, replica: ReplicaInfo) -> None:
        fault = InjectedFault(FaultKind.EXCEPTION)
        await self.observer.inject_fault(fault, rank=0, replica_id=replica.replica_id)

    async def _kill_scheduler(self, replica: ReplicaInfo) -> None:
        fault = InjectedFault(FaultKind.KILL)
        await self.observer.inject_fault(fault, replica_id=replica.replica_id)

    async def _kill_controller(self) -> None:
        for process in self._actors("FleetController"):
            process.kill()

    async def _kill_gateway(self) -> None:
        """Kill a gateway; its callers continue at the other one. Another process takes its place."""
        gateway = self._gateways[-1]
        gateway.process.process.kill()
        await asyncio.to_thread(gateway.process.close)
        await self._start_gateway(gateway)

    async def _kill_raylet(self) -> None:
        """Kill the second node's raylet, and with it the node; another node takes its place."""
        for process in psutil.Process(self._second.pid).children():
            if process.name() == "raylet":
                process.kill()
        await asyncio.to_thread(self._second.wait, RECOVERY_TIMEOUT_S)
        self._add_second()

    async def _pause_head(self) -> None:
        """Stop the head's control service for a while."""
        for process in psutil.Process(self._nodes.head_pid).children():
            if process.name() == "gcs_server":
                process.suspend()
                await asyncio.sleep(self._rng.uniform(0.5, 5.0))
                process.resume()

    async def _update(self) -> None:
        """Replace the replicas one by one by those of another version; half of the times kill a rank meanwhile."""
        self._num_updates += 1
        changed = "--weights-version", str(self._num_updates)
        target = self._gateways[0].process.address
        version = await _run_quire("deploy", *DEPLOYED, *self._adapter, *changed, "--target", target)
        async with asyncio.timeout(SETTLED_TIMEOUT_S):
            if self._rng.random() < 0.5:
                await asyncio.sleep(self._rng.uniform(0.5, 20.0))
                await self._of_replica(self._kill_rank)()
            while [replica.version for replica in await _ready(self.observer)] != [version] * NUM_REPLICAS:
                await asyncio.sleep(0.2)

    async def _kill_in_transfer(self) -> None:
        """Drain a replica, whose sequences move with their blocks, and kill a rank of either side meanwhile."""
        async with asyncio.timeout(SETTLED_TIMEOUT_S):
            while len(replicas := await _ready(self.observer)) < NUM_REPLICAS:
                await asyncio.sleep(0.2)
        lender, reader = self._rng.sample(replicas, 2)
        victim = self._rng.choice((lender, reader))
        await self.observer.drain(lender.replica_id)
        await asyncio.sleep(self._rng.uniform(*MOVES_S))
        status = (await self.observer.fleet()).replicas
        moved = sum(each.kv.num_kv_offers for each in status), sum(each.kv.num_kv_pulls for each in status)
        _log.info(
            "killing the %s after %d loans and %d reads", "lender" if victim is lender else "reader", *moved
        )
        with suppress(ProcessLookupError):  # the lender has drained and ended
            os.kill(victim.ranks[0].pid, signal.SIGKILL)

    def _actors(self, name: str) -> Iterable[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return processes_with(f"ray::{name}", self._nodes.head_pid, self._second.pid)
        return []


class NetworkSite(FleetSite):
    """See Site. Raises NetworkNotPermitted when it starts if this user may not make networks."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._network: FarNetwork
        self.faults = {"partition": self._cut, "loss": self._lose, "slow-network": self._slow_down}

    async def start(self) -> None:
        """Start the second node in a network of its own; the gateways and the controller are beside the first one."""
        self._network = open_network(self._before)
        self._near_ip, self._far_ip = self._network.near_ip, self._network.far_ip
        self._far_prefix = self._network.inside
        await super().start()

    async def _cut(self) -> None:
        """Cut the second node off; new requests are answered meanwhile."""
        with self._network.cut():
            await asyncio.gather(asyncio.sleep(self._rng.uniform(*CUT_S)), until_answered(self.observer))

    async def _lose(self) -> None:
        with self._network.lossy(self._rng.choice(LOSSES)):
            await asyncio.sleep(self._rng.uniform(*DISTURBED_S))

    async def _slow_down(self) -> None:
        with self._network.slow(self._rng.choice(RATES_BITS_PER_S)):
            await asyncio.sleep(self._rng.uniform(*DISTURBED_S))


async def _ready(client: AsyncClient) -> list[ReplicaInfo]:
    try:
        return [replica for replica in (await client.fleet()).replicas if replica.ready]
    except QuireError:
        return []


async def _run_quire(*arguments: str) -> str:
    """Run a command of quire and return the last word that it prints. Raises AssertionError if it fails."""
    program = "from quire.cluster.cli import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        printed, errors = await process.communicate()
    if process.returncode:
        raise AssertionError(f"quire {arguments[0]} failed: {errors.decode()}")
    return printed.decode().split()[-1]
