"""A thousand replicas and a hundred gateways in one process, in simulated time.

    python -m benchmarks.large_fleet [--replicas N] [--gateways N] --json benchmarks/results/large_fleet.json

Gateways (their connection to the controller, pools, routers and clients), the controller, and each replica's step
loop and scheduler are those that serve; each gateway is connected to its subset of replicas. Ranks take the time of a
roofline, and frames pass through memory at once: sockets and encryption are in `benchmarks.idle_fleet`. The event
loop moves its clock instead of waiting, and counts the processor time of whom it runs: the costs per simulated second
are those that each process of a fleet would have, which is too large for one machine.

Phases, each with ``<phase>.<owner>_cpu`` in processor milliseconds per second and ``<phase>.<owner>_messages`` per
second, of one gateway, one replica and the controller:

- ``idle``: no requests;
- ``traffic``: requests with prompts of their own; ``ttft_ms.p99`` is simulated;
- ``shared``: 80 % of the requests share three quarters of their prompt. ``shared.busiest`` is the number of requests
  at the busiest replica over the mean, beside ``traffic.busiest``;
- ``loss``: a tenth of the replicas is killed at once under traffic. ``noticed_s`` is the time until no gateway
  chooses them, ``replaced_s`` until as many others are ready at all gateways, ``failed`` counts requests;
- ``restart``: the controller ends, and another one adopts all replicas. ``adopted_s`` is the time until all are ready
  in its state; its processor time is in all, not per second.

``connections`` is the number of pairs of a gateway and a replica that it uses, ``memory.link_kb`` what a gateway
holds for each of these, with its entry for each replica of the fleet, and ``memory.gateway_mb`` the same of one
gateway.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import random
import selectors
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from benchmarks.common import Figure, make_parser, report
from benchmarks.in_memory import MemoryStore, ReceivedFrames
from benchmarks.replay import ReplicaModel
from quire.cluster.config.deployment import Deployment, ScalingLimits
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.fleet.controller.controller_client import FollowedState
from quire.cluster.fleet.controller.fleet import REST_AFTER_S, Fleet
from quire.cluster.fleet.controller.fleet_state import (
    Demand,
    FleetState,
    NodeEntry,
    ReplicaState,
)
from quire.cluster.fleet.controller.interfaces import BlockingCalls
from quire.cluster.fleet.controller.replica_lifecycle import STABLE_AFTER_S
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.fleet.replica.launch_progress import OnProgress
from quire.cluster.fleet.replica.record import ReplicaRecord
from quire.cluster.fleet.routing.subset import SUBSET_SIZE
from quire.cluster.gateway.routing.controller_sync import ControllerSync, _SyncedModel
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.cluster.gateway.routing.served_models import ServedModel, ServedModels
from quire.cluster.simulation.distribution import Distribution
from quire.cluster.simulation.replica import SimulatedReplica
from quire.cluster.simulation.traces import FIRST_TOKEN, VOCAB_SIZE
from quire.cluster.text.requests.request import Request
from quire.proto import stream
from quire.proto.errors import QuireError, ReplicaUnavailable
from quire.proto.replica_status import ReplicaStatus
from quire.proto.sampling import SamplingParams
from quire.proto.stream import GatewayMessage, ReplicaMessage
from quire.scheduler.service.loop import IDLE_CHECK_S

T = TypeVar("T")

MODEL = "none"
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 8
SHARED_TOKENS, SHARED_REQUESTS = 384, 0.8
# Of each replica.
REQUESTS_PER_S = 0.5
LAUNCH_S = 2.0
SILENCE_TIMEOUT_S = 70.0
READY_TIMEOUT_S = 600.0
# Until every replica has been idle for some rounds of what happens at intervals, and counts as stable: the controller
# replaces replicas that fail within their first minute one at a time. Then the controller rests, too.
CALM_S = max(STABLE_AFTER_S, REST_AFTER_S) + 5.0
START = 1_700_000_000.0

OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="benchmark")


class _Selector(selectors.SelectSelector):
    """Moves the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits, and no timer is left"
        self.now += max(0.0, timeout)
        return []


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop on simulated time, which counts the processor time of each owner's callbacks.

    Attributes:
        spent_s: owner |-> processor seconds.
    """

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)
        self._clock_resolution = 1e-6
        self.spent_s: Counter[str] = Counter()

    def time(self) -> float:
        return self._clock.now

    def _write_to_self(self) -> None:
        """Override: the loop never sleeps, so nothing has to wake it."""

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._count, callback, args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._count, callback, args, context=context)

    def _count(self, callback: Any, args: tuple[Any, ...]) -> None:
        began = time.process_time()
        try:
            callback(*args)
        finally:
            self.spent_s[OWNER.get()] += time.process_time() - began  # type: ignore[assignment]


def context_of(owner: str) -> contextvars.Context:
    """Return a context whose callbacks and tasks are counted as the owner's."""
    context = contextvars.copy_context()
    context.run(OWNER.set, owner)
    return context


class _Connection(ReceivedFrames):
    """See `cluster.fleet.replica.connection.Connection`: in memory."""

    def __init__(self, world: World, owner: str, replica: _Replica | None) -> None:
        super().__init__()
        self._world, self._owner, self._replica = world, owner, replica
        self._context = context_of(owner)
        self._identity = b""
        self._lost = asyncio.Event()

    def open(self) -> None:
        """See `Connection`."""
        if self._replica is not None and self._replica.is_up:
            self._identity = self._world.next_identity()
            self._replica.peers[self._identity] = self

    def send(self, frame: bytes) -> None:
        """See `Connection`."""
        self._world.num_messages[self._owner] += 1
        if self._identity and self._replica is not None:
            self._replica.arrive(self._identity, frame)

    def deliver_at(self, at: float, frame: bytes) -> None:
        self._world.loop.call_at(at, self._deliver, frame, context=self._context)

    def _deliver(self, frame: bytes) -> None:
        self._world.num_messages[self._owner] += 1
        self._arrive(frame)

    def break_off(self) -> None:
        """Lose the connection for good."""
        self._identity = b""
        self._lost.set()

    async def wait_until_lost(self) -> None:
        """See `Connection`."""
        await self._lost.wait()
        self._lost.clear()

    async def close(self, linger_ms: int) -> None:
        """See `Connection`."""
        if self._replica is not None:
            self._replica.peers.pop(self._identity, None)


class _Replica(SimulatedReplica):
    """A replica whose mailbox has many gateways. It is also its own `LiveReplica`.

    Attributes:
        num_chosen: requests, without canaries, that were sent to it.
    """

    def __init__(self, world: World, record: ReplicaRecord, model: ReplicaModel) -> None:
        super().__init__(record.replica_id, world.config, model.step_time, lambda *_: None, world.loop.time())
        self.record = record
        self.failure: Future[QuireError | None] = Future()
        self.is_up, self.num_chosen = True, 0
        self.peers: dict[bytes, _Connection] = {}
        self._world = world
        self._context = context_of("replica")
        self._frames: list[tuple[bytes, bytes]] = []
        self._encoded: tuple[ReplicaMessage | None, bytes] = None, b""
        self._idle: asyncio.TimerHandle | None = None
        self._turn_at(world.loop.time())

    def _turn_at(self, at: float) -> None:
        self._idle = self._world.loop.call_at(at, self._take_turn, context=self._context)

    def _take_turn(self) -> None:
        if not self.is_up:
            return
        now = self._world.loop.time()
        next_at = self.turn(now, now)
        self.is_stepping = next_at is not None
        self._turn_at(now + IDLE_CHECK_S if next_at is None else next_at)

    def arrive(self, identity: bytes, frame: bytes) -> None:
        """Take a frame; an idle replica handles it at once."""
        self._frames.append((identity, frame))
        if not self.is_stepping:
            self.is_stepping = True
            if self._idle is not None:
                self._idle.cancel()
            self._turn_at(self._world.loop.time())

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        frames, self._frames = self._frames, []
        self._world.num_messages["replica"] += len(frames)
        messages = []
        for identity, frame in frames:
            message = stream.decode(frame)
            assert isinstance(message, GatewayMessage)
            if isinstance(message, stream.Submit) and message.request_id != "canary":
                self.num_chosen += 1
            messages.append((identity, message))
        return messages

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        connection = self.peers.get(gateway)
        if connection is None:
            return False
        if message is not self._encoded[0]:  # as ZmqMailbox
            self._encoded = message, stream.encode(message)
        self._world.num_messages["replica"] += 1
        connection.deliver_at(max(self._clock.now, self._world.loop.time()), self._encoded[1])
        return True

    def kill(self) -> None:
        """End at once."""
        self.is_up = False
        for connection in list(self.peers.values()):
            connection.break_off()
        self.peers.clear()
        self.failure.set_result(ReplicaUnavailable(f"{self.replica_id} was killed"))

    def close(self) -> None:
        """See `LiveReplica`."""
        self.is_up = False


class _Calls(BlockingCalls):
    """Calls without threads; launches take LAUNCH_S."""

    def __init__(self) -> None:
        """Override: no pools of threads."""

    async def call(self, what: str, function: Callable[..., T], *arguments: object) -> T:
        return function(*arguments)

    remove = call

    def launch(self, function: Callable[[], T]) -> Future[T]:
        launched: Future[T] = Future()

        def run() -> None:
            try:
                launched.set_result(function())
            except Exception as error:
                launched.set_exception(error)

        asyncio.get_running_loop().call_later(LAUNCH_S, run)
        return launched

    def close(self) -> None:
        """Nothing to end."""


class _Launcher:
    """See `interfaces.Launcher`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def launch(
        self, deployment: Deployment, replica_id: str, on_progress: OnProgress, peers: Sequence[str] = ()
    ) -> _Replica:
        record = ReplicaRecord(
            replica_id, deployment.name, deployment.version, f"memory://{replica_id}",
            self._world.model.num_blocks, "none", (f"node-of-{replica_id}",), (1,),
        )  # fmt: skip
        replica = self._world.replicas[replica_id] = _Replica(self._world, record, self._world.model)
        return replica

    def adopt(self, record: ReplicaRecord) -> _Replica:
        return self._world.replicas[record.replica_id]

    def replace_scheduler(self, live: Any, number: int) -> _Replica:
        raise ReplicaUnavailable(f"no rank of {live.record.replica_id} answers")

    def remove(self, replica_id: str) -> None:
        self._world.replicas.pop(replica_id, None)

    def known(self) -> set[str]:
        return set(self._world.replicas)

    def nodes(self) -> tuple[NodeEntry, ...]:
        return tuple(NodeEntry(f"node-of-{name}", "127.0.0.1") for name in self._world.replicas)

    def cordon(self, node_id: str) -> None: ...

    def connect(self, record: ReplicaRecord, silence_timeout_s: float) -> ReplicaClient:
        return self._world.connect("controller", record, silence_timeout_s)

    def notice(self, node_id: str) -> None:
        return None


class _Controller:
    """See `controller_client.Controller`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._followed = FollowedState()

    async def keys(self) -> None:
        return None

    async def statuses(self) -> list[ReplicaStatus]:
        raise AssertionError("nobody looks at this fleet")

    async def watch(self, gateway_id: str, since: str, timeout_s: float) -> FleetState | None:
        fleet, known = self._world.fleet, self._followed.known(since)
        self._world.num_messages["controller"] += 2
        asking = asyncio.get_running_loop().create_task(
            fleet.follow(gateway_id, known, timeout_s), context=context_of("controller")
        )
        encoded = await asking
        return self._followed.receive(encoded) if fleet is self._world.fleet else None

    async def report(self, gateway_id: str, demand: Mapping[str, Demand]) -> None:
        self._world.num_messages["controller"] += 1
        context_of("controller").run(self._world.fleet.report, gateway_id, demand)

    async def apply(self, command: Any) -> Mapping[str, Any]:
        raise AssertionError("nobody operates this fleet")


class _Gateway(ControllerSync):
    """A gateway without servers and without processes for texts: its prompts are token ids."""

    def __init__(self, world: World) -> None:
        super().__init__(_Controller(world), ServedModels(), subset_size=world.subset_size)
        self._world = world

    @property
    def pool(self) -> ReplicaPool:
        return self._models.find(MODEL).pool

    def used(self) -> dict[str, bool]:
        """Return replica_id |-> whether it may choose the replica, of its subset."""
        return {
            name: not model.pool.why_unavailable(name)
            for model in self._models
            for name in model.pool.clients
        }

    def _connect(self, record: ReplicaRecord, silence_timeout_s: float) -> ReplicaClient:
        client = self._world.connect("gateway", record, silence_timeout_s)
        client.start()
        return client

    async def _apply_deployment(self, deployment: Deployment, state: FleetState) -> None:
        if deployment.name not in self._synced:
            workers: Any = None
            served = ServedModel(
                self._world.config, workers, workers, self._new_pool(self._world.config), workers, workers
            )
            self._synced[deployment.name] = _SyncedModel(deployment.version, served, SILENCE_TIMEOUT_S)
            self._models.add(served)


class World:
    """A fleet, its gateways and its requests.

    Attributes:
        num_messages: owner |-> frames and calls that it sent and received.
    """

    def __init__(
        self, loop: CountingLoop, num_replicas: int, num_gateways: int, subset_size: int = SUBSET_SIZE
    ) -> None:
        self.loop, self.num_replicas, self.num_gateways = loop, num_replicas, num_gateways
        self.subset_size = subset_size
        self.model = ReplicaModel(num_blocks=1024)
        self.config = self.model.config()
        self.replicas: dict[str, _Replica] = {}
        self.gateways: list[_Gateway] = []
        self.num_messages: Counter[str] = Counter()
        self.ttft = Distribution()
        self.outcomes: Counter[str] = Counter()
        self._store, self._num_identities = MemoryStore(), 0
        self._rng = np.random.default_rng(1)
        self._shared = self._tokens(SHARED_TOKENS)
        self._reading: set[asyncio.Task[None]] = set()
        self.fleet: Fleet = self._new_fleet()

    def _new_fleet(self) -> Fleet:
        return Fleet(
            _Launcher(self),
            self._store,
            clock=self.loop.time,
            wall_clock=lambda: START + self.loop.time(),
            blocking=_Calls(),
        )

    def next_identity(self) -> bytes:
        self._num_identities += 1
        return b"%d" % self._num_identities

    def connect(self, owner: str, record: ReplicaRecord, silence_timeout_s: float) -> ReplicaClient:
        connection = _Connection(self, owner, self.replicas.get(record.replica_id))
        return ReplicaClient(
            record.endpoint,
            record.replica_id,
            silence_timeout_s=silence_timeout_s,
            load_only=owner == "controller",
            connection=connection,
        )

    async def start(self) -> int:
        """Start the fleet and then the gateways; return the memory of all gateways, in bytes."""
        limits = ScalingLimits(min_replicas=self.num_replicas, max_replicas=self.num_replicas)
        await self.fleet.deploy(Deployment(EngineOptions(MODEL), limits=limits))
        self._running = self.loop.create_task(self.fleet.run(), context=context_of("controller"))
        await self._until("the controller", lambda: self._num_known() == self.num_replicas)
        before = _resident_bytes()
        for _ in range(self.num_gateways):
            context = context_of("gateway")
            gateway = context.run(_Gateway, self)
            context.run(gateway.start)
            self.gateways.append(gateway)
        await self._until("all gateways", lambda: self._are_gateways_known() and self._all_ready())
        return _resident_bytes() - before

    def _num_known(self) -> int:
        return sum(entry.state is ReplicaState.READY for entry in self.fleet.state().replicas)

    def _are_gateways_known(self) -> bool:
        return len(self.fleet.state().gateways or ()) == self.num_gateways

    def num_connections(self) -> int:
        return sum(len(gateway.used()) for gateway in self.gateways)

    def _all_ready(self) -> bool:
        """Return whether each gateway may choose all replicas of its subset, and each replica is in one."""
        subsets = [gateway.used() for gateway in self.gateways]
        is_complete = len(set().union(*subsets)) == self._num_known() == self.num_replicas
        return is_complete and all(all(used.values()) for used in subsets)

    async def _until(self, what: str, condition: Callable[[], bool], interval_s: float = 0.5) -> float:
        """Return the simulated seconds until a condition holds."""
        began = self.loop.time()
        while not condition():
            assert self.loop.time() < began + READY_TIMEOUT_S, f"{what} took more than {READY_TIMEOUT_S:g} s"
            await asyncio.sleep(interval_s)
        return self.loop.time() - began

    def _tokens(self, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self._rng.integers(FIRST_TOKEN, VOCAB_SIZE, count).astype(np.int32)

    async def send_requests(self, seconds: float, shared: float = 0.0) -> None:
        """Send the requests of a Poisson process to random gateways, some of which share a prefix."""
        rate, until = REQUESTS_PER_S * self.num_replicas, self.loop.time() + seconds
        while (wait_s := float(self._rng.exponential(1 / rate))) < until - self.loop.time():
            await asyncio.sleep(wait_s)
            prompt = self._tokens(PROMPT_TOKENS)
            if self._rng.random() < shared:
                prompt[:SHARED_TOKENS] = self._shared
            gateway = self.gateways[int(self._rng.integers(self.num_gateways))]
            reading = self.loop.create_task(self._read(gateway, prompt), context=context_of("gateway"))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    async def _read(self, gateway: _Gateway, prompt: Any) -> None:
        began = self.loop.time()
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
        try:
            is_first = True
            async for _, update in gateway.pool.submit(Request("request", prompt, sampling)):
                if is_first and update.token_ids:
                    self.ttft.add(self.loop.time() - began)
                    is_first = False
                if update.finish is not None and update.finish.error:
                    raise update.finish.to_error()
            self.outcomes["complete"] += 1
        except QuireError as error:
            self.outcomes[type(error).__name__] += 1

    async def settle(self) -> None:
        """Wait for the requests that run."""
        await self._until("the end of the requests", lambda: not self._reading)

    def lose(self, count: int) -> set[str]:
        """Kill so many replicas at once; return their ids."""
        lost = random.Random(0).sample(sorted(self.replicas), count)
        for replica_id in lost:
            self.replicas[replica_id].kill()
        return set(lost)

    async def until_noticed(self, lost: set[str]) -> float:
        def is_noticed() -> bool:
            return not any(
                not gateway.pool.why_unavailable(name)
                for gateway in self.gateways
                for name in lost & gateway.pool.clients.keys()
            )

        return await self._until("noticing a loss", is_noticed, 0.05)

    async def until_replaced(self) -> float:
        return await self._until("replacing what was lost", self._all_ready)

    async def restart_controller(self) -> float:
        """End the controller and start another one; return the seconds until it has adopted all replicas."""
        self._running.cancel()
        await self.fleet.close()
        self.fleet = self._new_fleet()
        context = context_of("controller")
        await self.loop.create_task(self.fleet.recover(), context=context)
        self._running = self.loop.create_task(self.fleet.run(), context=context)
        return await self._until("adopting all replicas", lambda: self._num_known() == self.num_replicas)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Meter:
    """Counts what a phase of a world costs."""

    def __init__(self, world: World, phase: str, note: str) -> None:
        self._world, self._phase, self._note = world, phase, note
        self._began = world.loop.time()
        self._spent_s, self._num_messages = Counter(world.loop.spent_s), Counter(world.num_messages)

    def figures(self) -> dict[str, Figure]:
        """Return processor time and messages per simulated second so far, of one process of each kind."""
        world, seconds = self._world, self._world.loop.time() - self._began
        figures = {}
        for owner, count in (
            ("gateway", world.num_gateways),
            ("replica", world.num_replicas),
            ("controller", 1),
        ):
            spent_s = (world.loop.spent_s[owner] - self._spent_s[owner]) / (seconds * count)
            messages = (world.num_messages[owner] - self._num_messages[owner]) / (seconds * count)
            name = f"large_fleet.{self._phase}.{owner}"
            figures[f"{name}_cpu"] = Figure(1000 * spent_s, "ms/s", self._note)
            figures[f"{name}_messages"] = Figure(messages, "1/s", self._note)
        return figures


async def measure_traffic(
    world: World, phase: str, seconds: float, note: str, shared: float
) -> dict[str, Figure]:
    """Return the costs and latencies of requests, and how evenly replicas get them."""
    for replica in world.replicas.values():
        replica.num_chosen = 0
    world.ttft, meter = Distribution(), Meter(world, phase, note)
    await world.send_requests(seconds, shared)
    figures = meter.figures()
    await world.settle()
    counts = [replica.num_chosen for replica in world.replicas.values()]
    busiest = max(counts) * len(counts) / max(1, sum(counts))
    remark = f"{sum(counts)} requests; {note}"
    return figures | {
        f"large_fleet.{phase}.busiest": Figure(
            busiest, "x", f"requests of the busiest replica over the mean; {remark}"
        ),
        f"large_fleet.{phase}.ttft_ms.p50": Figure(1e3 * world.ttft.quantile(0.5), "ms", remark),
        f"large_fleet.{phase}.ttft_ms.p99": Figure(1e3 * world.ttft.quantile(0.99), "ms", remark),
    }


async def measure(world: World, seconds: float) -> dict[str, Figure]:
    """Return the figures of all phases."""
    note = f"{world.num_replicas} replicas x {world.num_gateways} gateways"
    num_bytes = await world.start()
    num_connections = world.num_connections()
    figures = {
        "large_fleet.connections": Figure(num_connections, "connections", note),
        "large_fleet.memory.link_kb": Figure(
            num_bytes / num_connections / 1024, "KB", f"of a gateway, for each connection; {note}"
        ),
        "large_fleet.memory.gateway_mb": Figure(
            num_bytes / world.num_gateways / 1024**2, "MB", f"of a gateway, for all replicas; {note}"
        ),
    }
    await asyncio.sleep(CALM_S)
    meter = Meter(world, "idle", note)
    await asyncio.sleep(2 * seconds)
    figures |= meter.figures()
    load = f"{REQUESTS_PER_S:g} requests/s of each replica; {note}"
    figures |= await measure_traffic(world, "traffic", seconds, load, 0.0)
    figures |= await measure_traffic(world, "shared", seconds, load, SHARED_REQUESTS)
    return figures | await measure_loss(world, load) | await measure_restart(world, note)


async def measure_loss(world: World, note: str) -> dict[str, Figure]:
    """Kill a tenth of the replicas under traffic."""
    world.outcomes.clear()
    sending = asyncio.ensure_future(world.send_requests(6.0))
    await asyncio.sleep(2.0)
    lost, meter = world.lose(max(1, world.num_replicas // 10)), Meter(world, "loss", note)
    noticed_s = await world.until_noticed(lost)
    replaced_s = noticed_s + await world.until_replaced()
    figures = meter.figures()
    await sending
    await world.settle()
    num_failed = world.outcomes.total() - world.outcomes["complete"]
    remark = f"{len(lost)} replicas killed at once; {note}"
    return figures | {
        "large_fleet.loss.noticed_s": Figure(noticed_s, "s", remark),
        "large_fleet.loss.replaced_s": Figure(replaced_s, "s", f"{remark}; a launch takes {LAUNCH_S:g} s"),
        "large_fleet.loss.failed": Figure(num_failed, "requests", f"of {world.outcomes.total()}; {remark}"),
    }


async def measure_restart(world: World, note: str) -> dict[str, Figure]:
    before = world.loop.spent_s["controller"]
    adopted_s = await world.restart_controller()
    spent_s = world.loop.spent_s["controller"] - before
    return {
        "large_fleet.restart.adopted_s": Figure(adopted_s, "s", note),
        "large_fleet.restart.controller_cpu_s": Figure(spent_s, "s", f"in all; {note}"),
    }


@contextmanager
def simulated_time(loop: CountingLoop) -> Iterator[None]:
    """Let this process's modules read the loop's clock."""
    with patch.object(time, "monotonic", loop.time), patch.object(time, "time", lambda: START + loop.time()):
        yield


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--replicas", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--gateways", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument(
        "--subset", type=int, default=SUBSET_SIZE, help="replicas that a gateway uses (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="simulated, of each phase (default: %(default)s)"
    )
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    random.seed(0)
    loop = CountingLoop()
    asyncio.set_event_loop(loop)

    async def run() -> dict[str, Figure]:
        return await measure(
            World(loop, arguments.replicas, arguments.gateways, arguments.subset), arguments.seconds
        )

    with simulated_time(loop):
        figures = loop.run_until_complete(run())
    report(figures, arguments.json)
    sys.stdout.flush()
    os._exit(0)  # without closing a hundred thousand connections in order


if __name__ == "__main__":
    main()
