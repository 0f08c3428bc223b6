"""CPU time of a fleet without load: gateways' pools, the controller and step loops that serve, over TCP with keys.

    python -m benchmarks.idle_fleet --json benchmarks/results/idle_fleet.json

Each row has three processes: one with the step loops and schedulers of all replicas, whose ranks take no time; one
with the replica pools of the gateways; one with the controller, on which `WATCHERS` gateways wait for changes. Many
replicas meet one gateway, and ten replicas a hundred: one machine lacks the sockets for a thousand replicas and a
hundred gateways, and a gateway's cost depends on its replicas alone, a replica's on its gateways.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from benchmarks.common import Figure, make_parser, report
from benchmarks.in_memory import MemoryStore
from benchmarks.scheduler import NoOpGroup, make_model
from quire.cluster.config.deployment import Deployment, ScalingLimits
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.resolve import engine_config
from quire.cluster.fleet.controller.fleet import Fleet
from quire.cluster.fleet.controller.fleet_state import FleetChanges, NodeEntry, ReplicaState
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.fleet.replica.launch_progress import OnProgress
from quire.cluster.fleet.replica.record import ReplicaRecord
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.proto import stream
from quire.proto.errors import QuireError
from quire.proto.step import StepResult
from quire.proto.stream import GatewayMessage, ReplicaMessage
from quire.proto.transport.network import CurveGuard, CurveKeys, bind
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import IDLE_CHECK_S, StepLoop

# (replicas, gateways)
SIZES = ((10, 1), (100, 1), (1000, 1), (10, 100))
WATCHERS = 100
BLOCK_SIZE = 16
SILENCE_TIMEOUT_S = 70.0
READY_TIMEOUT_S = 300.0
# Until every replica has been idle for some rounds of what happens at intervals.
CALM_S = 15.0
MAX_SOCKETS = 65_000


class _Mailbox:
    """Mailbox on a socket of a context that the replicas share; `receive` never waits."""

    def __init__(self, context: zmq.Context[Any], keys: CurveKeys) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint = bind(self.socket, "tcp://127.0.0.1:*", keys)
        self.num_messages = 0
        self._sent: tuple[ReplicaMessage | None, bytes] = None, b""

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        messages = []
        while self.socket.poll(0):
            gateway, frame = self.socket.recv_multipart()
            message = stream.decode(frame)
            assert isinstance(message, GatewayMessage)
            messages.append((gateway, message))
        self.num_messages += len(messages)
        return messages

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        if message is not self._sent[0]:  # as ZmqMailbox
            self._sent = message, stream.encode(message)
        try:
            self.socket.send_multipart((gateway, self._sent[1]), flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        self.num_messages += 1
        return True

    def wake(self) -> None: ...


class _Ranks(NoOpGroup):
    """Ranks that take no time, for canaries: each new sequence ends with its first token."""

    def __init__(self) -> None:
        super().__init__(1)
        self._results: deque[StepResult] = deque()

    def broadcast(self, plan: Any) -> None:
        tokens = np.full(len(plan.new), 100, np.int32)
        self._results.append(StepResult(plan.step_id, plan.epoch, 0, tokens))

    def gather(self, timeout_s: float) -> StepResult:
        return self._results.popleft()


@dataclass(frozen=True, slots=True)
class _Usage:
    """CPU seconds and messages of a process so far; its replicas or gateways that are ready."""

    cpu_s: float
    num_messages: int = 0
    num_ready: int = 0
    num_steps: int = 0


def _serve_replicas(pipe: Connection, keys: CurveKeys, num_replicas: int) -> None:
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    CurveGuard(context, keys)
    options = EngineOptions("none", block_size=BLOCK_SIZE, num_kv_blocks=256, max_num_seqs=64)
    config = engine_config(options, make_model())
    mailboxes = [_Mailbox(context, keys) for _ in range(num_replicas)]
    schedulers = [Scheduler(config) for _ in mailboxes]
    loops = {
        mailbox.socket: StepLoop(scheduler, _Ranks(), mailbox, f"replica-{number}")
        for number, (mailbox, scheduler) in enumerate(zip(mailboxes, schedulers, strict=True))
    }
    poller = zmq.Poller()
    for socket in loops:
        poller.register(socket, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    pipe.send([mailbox.endpoint for mailbox in mailboxes])
    spent_s, due_at = 0.0, time.monotonic()
    while True:
        ready = [socket for socket, _ in poller.poll(100)]
        began = time.process_time()  # without the poll of a thousand sockets, which a replica does not do
        turning: Iterable[StepLoop] = [loops[socket] for socket in ready if socket in loops]
        if time.monotonic() >= due_at:
            due_at += IDLE_CHECK_S
            turning = loops.values()
        for loop in turning:
            loop.turn()
            loop.turn()
        spent_s += time.process_time() - began
        if pipe.poll():
            if pipe.recv() is None:
                return
            num_steps = sum(scheduler.stats.num_steps for scheduler in schedulers)
            pipe.send(_Usage(spent_s, sum(each.num_messages for each in mailboxes), num_steps=num_steps))


def _run_gateways(pipe: Connection, keys: CurveKeys, endpoints: list[str], num_gateways: int) -> None:
    asyncio.run(_gateways(pipe, keys, endpoints, num_gateways))


async def _gateways(pipe: Connection, keys: CurveKeys, endpoints: list[str], num_gateways: int) -> None:
    pools = [ReplicaPool("none", BLOCK_SIZE) for _ in range(num_gateways)]
    for pool in pools:
        for number, endpoint in enumerate(endpoints):
            name = f"replica-{number}"
            client = ReplicaClient(endpoint, name, silence_timeout_s=SILENCE_TIMEOUT_S, keys=keys)
            client.start()
            pool.add(client)
            if number % 50 == 49:
                await asyncio.sleep(0.05)

    def num_ready() -> int:
        return sum(not pool.why_unavailable(name) for pool in pools for name in pool.clients)

    await _answer(pipe, num_ready)


class _Live:
    """See `supervised_replica.LiveReplica`."""

    def __init__(self, record: ReplicaRecord) -> None:
        self.record = record
        self.failure: Future[QuireError | None] = Future()

    def close(self) -> None: ...


class _Launcher:
    """See `interfaces.Launcher`: its replicas run already."""

    def __init__(self, keys: CurveKeys, endpoints: list[str]) -> None:
        self._keys, self._endpoints = keys, endpoints
        self._numbers = itertools.count()
        self._live: dict[str, _Live] = {}

    def launch(
        self, deployment: Deployment, replica_id: str, on_progress: OnProgress, peers: Sequence[str] = ()
    ) -> _Live:
        number = next(self._numbers)
        record = ReplicaRecord(
            replica_id, deployment.name, deployment.version, self._endpoints[number], 256, "none",
            (f"node-{number}",) * 2, (1, 2),
        )  # fmt: skip
        live = self._live[replica_id] = _Live(record)
        return live

    def adopt(self, record: ReplicaRecord) -> _Live:
        return self._live[record.replica_id]

    def replace_scheduler(self, live: Any, number: int) -> _Live:
        raise AssertionError("a scheduler that does not fail is replaced")

    def remove(self, replica_id: str) -> None: ...

    def known(self) -> set[str]:
        return set(self._live)

    def nodes(self) -> tuple[NodeEntry, ...]:
        names = {name for live in self._live.values() for name in live.record.node_ids}
        return tuple(NodeEntry(name, "127.0.0.1", (("GPU", 8.0),)) for name in sorted(names))

    def cordon(self, node_id: str) -> None: ...

    def connect(self, record: ReplicaRecord, silence_timeout_s: float) -> ReplicaClient:
        return ReplicaClient(
            record.endpoint,
            record.replica_id,
            silence_timeout_s=silence_timeout_s,
            load_only=True,
            keys=self._keys,
        )

    def notice(self, node_id: str) -> None:
        return None


def _run_controller(pipe: Connection, keys: CurveKeys, endpoints: list[str]) -> None:
    asyncio.run(_controller(pipe, keys, endpoints))


async def _controller(pipe: Connection, keys: CurveKeys, endpoints: list[str]) -> None:
    fleet = Fleet(_Launcher(keys, endpoints), MemoryStore())
    limits = ScalingLimits(min_replicas=len(endpoints), max_replicas=len(endpoints))
    await fleet.deploy(Deployment(EngineOptions("none"), limits=limits))
    tasks = [asyncio.create_task(fleet.run())]
    tasks += [asyncio.create_task(_watch(fleet)) for _ in range(WATCHERS)]

    def num_ready() -> int:
        return sum(entry.state is ReplicaState.READY for entry in fleet.state().replicas)

    await _answer(pipe, num_ready)


async def _watch(fleet: Fleet) -> None:
    """Follow the fleet's state as a gateway does."""
    since = ""
    while True:
        encoded = await fleet.changes(since, 30.0)
        if encoded is not None:
            changes: FleetChanges = pickle.loads(encoded)  # noqa: S301  of this process
            since = changes.version


async def _answer(pipe: Connection, num_ready: Callable[[], int]) -> None:
    """Answer each question for the usage, until one is None."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
    while True:
        await asked.wait()
        asked.clear()
        if pipe.recv() is None:
            return
        pipe.send(_Usage(time.process_time(), num_ready=num_ready()))


class _Process:
    """A process of a fleet, which is asked for its usage."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_run_quietly, args=(function, end, *arguments), daemon=True)
        self._process.start()
        end.close()

    def receive(self) -> Any:
        return self._pipe.recv()

    def usage(self) -> _Usage:
        self._pipe.send("usage")
        found: _Usage = self._pipe.recv()
        return found

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


def _run_quietly(function: Callable[..., None], *arguments: object) -> None:
    logging.disable(logging.WARNING)
    function(*arguments)


def measure(num_replicas: int, num_gateways: int, seconds: float) -> dict[str, Figure]:
    """Return the CPU seconds per second of a gateway, of the controller and of a replica."""
    keys = CurveKeys.generate()
    replicas = _Process(_serve_replicas, keys, num_replicas)
    endpoints = replicas.receive()
    gateways = _Process(_run_gateways, keys, endpoints, num_gateways)
    controller = _Process(_run_controller, keys, endpoints)
    processes = replicas, gateways, controller
    try:
        _wait_ready(gateways, num_replicas * num_gateways)
        _wait_ready(controller, num_replicas)
        time.sleep(CALM_S)
        before, began_at = [each.usage() for each in processes], time.monotonic()
        time.sleep(seconds)
        after, elapsed_s = [each.usage() for each in processes], time.monotonic() - began_at
        assert after[1].num_ready == num_replicas * num_gateways, "a replica is not ready any more"
    finally:
        for each in processes:
            each.end()
    of_replicas, of_gateways, of_controller = (
        (late.cpu_s - early.cpu_s) / elapsed_s for early, late in zip(before, after, strict=True)
    )
    messages = (after[0].num_messages - before[0].num_messages) / elapsed_s
    steps = (after[0].num_steps - before[0].num_steps) / elapsed_s
    size, note = (
        f"{num_replicas}.{num_gateways}",
        f"no load, {num_replicas} replicas x {num_gateways} gateways",
    )
    return {
        f"idle_fleet.gateway_cpu.{size}": Figure(of_gateways / num_gateways, "s/s", f"one gateway; {note}"),
        f"idle_fleet.controller_cpu.{size}": Figure(
            of_controller, "s/s", f"{WATCHERS} gateways wait for changes; {note}"
        ),
        f"idle_fleet.replica_cpu_ms.{size}": Figure(
            1000 * of_replicas / num_replicas, "ms/s", f"one scheduler; {note}"
        ),
        f"idle_fleet.replica_messages.{size}": Figure(
            messages / num_replicas, "1/s", f"of one replica; {note}"
        ),
        f"idle_fleet.replica_steps.{size}": Figure(
            steps / num_replicas, "1/s", f"canaries of one replica; {note}"
        ),
    }


def _wait_ready(process: _Process, count: int) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while (ready := process.usage().num_ready) < count:
        assert time.monotonic() < deadline, f"{ready} of {count} were ready in {READY_TIMEOUT_S:g} s"
        time.sleep(1.0)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to count")
    parser.add_argument("--most", type=int, default=1000, help="most replicas")
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    for num_replicas, num_gateways in SIZES:
        if num_replicas <= arguments.most:
            figures |= measure(num_replicas, num_gateways, arguments.seconds)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
