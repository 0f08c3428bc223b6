"""Simulated replicas: the real step loop and scheduler over fake ranks, and the launcher that starts them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from fake_kv_peer import FakeKvNetwork, FakeKvPeer
from fakes import FakeWorkerGroup, small_config

from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.controller.fleet_state import NodeEntry
from quire.cluster.fleet.controller.interfaces import BlockingCalls
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.fleet.replica.launch_progress import LaunchProgress, LaunchStage, OnProgress
from quire.cluster.fleet.replica.record import ReplicaRecord
from quire.cluster.fleet.replica.supervised_replica import LiveReplica
from quire.proto.config import EngineConfig
from quire.proto.errors import QuireError, RankFailed, ReplicaUnavailable
from quire.proto.kv_transfer import KvReportKind
from quire.proto.step import StepPlan, StepResult
from quire.proto.stream import GatewayMessage, ReplicaMessage, decode, encode
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import IDLE_CHECK_S, StepLoop

from .event_loop import START
from .network import Network, Server, SimulatedConnection

T = TypeVar("T")

MODEL = "demo"

HEARTBEAT_S = 2.0
STEP_S = 0.03, 0.2
# Time after which Ray reports a process that has ended.
DETECTION_S = 0.02, 1.0
LAUNCH_S = 0.5, 4.0
# Times that a rank may take to read blocks; the scheduler waits for some of them only.
READ_S = 0.0, 0.01, 0.1, 1.0, 30.0


def replica_config() -> EngineConfig:
    """Return the configuration of every replica and gateway; its model is that of the fake ranks."""
    config = small_config(
        num_blocks=40,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=48,
        step_timeout_s=5.0,
        kv_transfer=True,
    )
    return replace(config, model=replace(config.model, name=MODEL))


class KvLinks:
    """The ways by which ranks read each other's blocks: with delays, and with faults for a time.

    Attributes:
        peers: of replicas whose processes live.
        stalled: replicas whose reads do not end.
        loses_reports: what readers tell a replica's ranks is lost: that they use leases, or need them no more.
    """

    def __init__(self, network: Network, rng: random.Random) -> None:
        self.peers = FakeKvNetwork()
        self.stalled: set[str] = set()
        self.loses_reports = False
        self.num_read = Counter[str]()
        self._network, self._rng = network, rng
        self._due: dict[tuple[str, int], float] = {}  # replica and pull |-> when it has read

    def read_due(self, replica: SimulatedReplica, now: float) -> None:
        """Carry out the reads of a replica whose time has come; some never come, or fail."""
        peer, name = replica.kv_peer, replica.record.replica_id
        if self.loses_reports:
            lost = KvReportKind.RENEWED, KvReportKind.RELEASED
            peer.reports = [each for each in peer.reports if each.kind not in lost]
        for pull_id, pull in list(peer.pulls.items()):
            owner = pull.endpoints[0].rpartition(".")[0]
            if (peer.endpoint, pull_id) not in self._due:
                self._due[peer.endpoint, pull_id] = now + self._rng.choice(READ_S)
                self.num_read["ordered"] += 1
            due = self._due[peer.endpoint, pull_id]
            is_apart = self._network.are_apart(name, owner) or name in self.stalled or owner in self.stalled
            if now < due or is_apart:
                continue
            before = len(peer.reports)
            peer.read(pull_id)
            report = peer.reports[-1]
            assert len(peer.reports) > before
            self.num_read[report.name.partition(":")[0] or "read"] += 1


class _Mailbox:
    """See `Mailbox`. `receive` never waits: the replica's task does."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._messages: list[tuple[bytes, GatewayMessage]] = []
        self.arrival = asyncio.Event()

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        message = decode(frame)
        assert isinstance(message, GatewayMessage)
        self._messages.append((identity, message))
        self.arrival.set()

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        self.arrival.clear()
        messages, self._messages = self._messages, []
        return messages

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        return self._server.send(gateway, encode(message))

    def wake(self) -> None:
        self.arrival.set()


class _Ranks(FakeWorkerGroup):
    """Fake ranks that report times by which it is faster to read blocks than to compute them."""

    def execute(self, plan: StepPlan) -> StepResult:
        seconds = 0.1 if plan.chunk_rows.size else 0.01
        return replace(super().execute(plan), stage_times={"forward": seconds})


class SimulatedReplica:
    """See `interfaces.LiveReplica`. Its processes are one task.

    Attributes:
        may_run: cleared while the process is stopped.
        ended_at: when the process ended; None while it runs.
    """

    def __init__(self, record: ReplicaRecord, network: Network, kv: KvLinks, rng: random.Random) -> None:
        self.record = record
        self._kv = kv
        self.failure: Future[QuireError | None] = Future()
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.stopped_at: float | None = None
        self.ended_at: float | None = None
        self.config = replica_config()
        self.group = _Ranks(self.config)
        self.kv_peer = FakeKvPeer(kv.peers, record.replica_id, lambda: self.group.kv, record.version)
        self.group.kv_peer = self.kv_peer
        self.scheduler = Scheduler(self.config)
        self.server = Server(
            record.replica_id, lambda identity, frame: self._mailbox.on_frame(identity, frame)
        )
        self._mailbox = _Mailbox(self.server)
        self._network = network
        self._rng = rng
        loop = asyncio.get_running_loop()
        self._loop = StepLoop(self.scheduler, self.group, self._mailbox, record.replica_id, loop.time)
        self._task = loop.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self.may_run.wait()
            self._loop.handle_messages(0.0)
            self._kv.read_due(self, asyncio.get_running_loop().time())
            try:
                is_busy = self._loop.step()
            except RankFailed as error:
                self._loop._fail_all(error)
                await asyncio.sleep(0.01)  # its messages leave
                self._end(error)
                return
            self.scheduler.check_integrity()
            if is_busy:
                await asyncio.sleep(self._rng.uniform(*STEP_S))
                continue
            try:
                async with asyncio.timeout(IDLE_CHECK_S):
                    await self._mailbox.arrival.wait()
            except TimeoutError:
                pass

    def fail_rank(self) -> None:
        """Let the next step fail."""
        self.group.failure = RankFailed(0, "killed by the simulation")
        self._mailbox.wake()

    def stop_for(self, seconds: float) -> None:
        """Stop the process, as SIGSTOP does, for a time."""
        self.may_run.clear()
        self.stopped_at = asyncio.get_running_loop().time()
        asyncio.get_running_loop().call_later(seconds, self._continue)

    def _continue(self) -> None:
        self.stopped_at = None
        self.may_run.set()

    def kill(self) -> None:
        """End the process at once, as SIGKILL does."""
        if self.ended_at is None:
            self._task.cancel()
            self._end(ReplicaUnavailable("killed by the simulation"))

    def close(self) -> None:
        """See `LiveReplica`."""
        if self.ended_at is None:
            self._loop._fail_all(ReplicaUnavailable(f"{self.record.replica_id} is shutting down"))
            self._task.cancel()
            self._end(None)

    def _end(self, error: QuireError | None) -> None:
        loop = asyncio.get_running_loop()
        self.ended_at, self.server.is_up = loop.time(), False
        self._kv.peers.peers.pop(self.kv_peer.endpoint, None)
        self._network.break_all(self.server)
        loop.call_later(self._rng.uniform(*DETECTION_S), self.failure.set_result, error)


@dataclass(slots=True)
class Cluster:
    """Everything that outlives a controller: replicas, their places and the store.

    Attributes:
        live: replica_id |-> replica with processes or a place.
        departing: node_id |-> Unix time of its end.
    """

    network: Network
    kv: KvLinks
    rng: random.Random
    live: dict[str, SimulatedReplica]
    departing: dict[str, float]
    texts: dict[str, str]
    num_failing_launches: int = 0
    num_failing_calls: int = 0

    def fail_some(self) -> None:
        if self.num_failing_calls:
            self.num_failing_calls -= 1
            raise ConnectionError("the Ray head node is not reachable")


class SimulatedLauncher:
    """See `interfaces.Launcher`: of one controller."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._notices: dict[str, Future[float]] = {}

    def launch(
        self, deployment: Deployment, replica_id: str, on_progress: OnProgress, peers: Sequence[str] = ()
    ) -> SimulatedReplica:
        cluster = self._cluster
        on_progress(LaunchProgress(LaunchStage.PLACING))
        if cluster.num_failing_launches:
            cluster.num_failing_launches -= 1
            raise ReplicaUnavailable(f"{replica_id} could not be placed")
        record = ReplicaRecord(
            replica_id=replica_id,
            model=deployment.name,
            version=deployment.version,
            endpoint=f"simulated://{replica_id}",
            num_kv_blocks=replica_config().cache.num_kv_blocks or 0,
            namespace="simulated",
            node_ids=(f"node-of-{replica_id}",),
            pids=(1,),
        )
        replica = SimulatedReplica(record, cluster.network, cluster.kv, cluster.rng)
        cluster.live[replica_id] = replica
        return replica

    def adopt(self, record: ReplicaRecord) -> SimulatedReplica:
        replica = self._cluster.live.get(record.replica_id)
        if replica is None or replica.ended_at is not None:
            raise ReplicaUnavailable(f"{record.replica_id} does not run any more")
        return replica

    def replace_scheduler(self, live: LiveReplica, number: int) -> SimulatedReplica:
        raise ReplicaUnavailable(f"no rank of {live.record.replica_id} answers")

    def remove(self, replica_id: str) -> None:
        self._cluster.fail_some()
        replica = self._cluster.live.pop(replica_id, None)
        if replica is not None:
            replica.kill()

    def known(self) -> set[str]:
        return set(self._cluster.live)

    def nodes(self) -> tuple[NodeEntry, ...]:
        self._cluster.fail_some()
        departing = self._cluster.departing
        return tuple(
            NodeEntry(
                node_id, "127.0.0.1", is_draining=node_id in departing, gone_at=departing.get(node_id, 0.0)
            )
            for replica in self._cluster.live.values()
            for node_id in replica.record.node_ids
        )

    def cordon(self, node_id: str) -> None:
        self._cluster.departing.setdefault(node_id, 0.0)

    def connect(self, record: ReplicaRecord, silence_timeout_s: float = 60.0) -> ReplicaClient:
        return connect(self._cluster, "controller", record, silence_timeout_s)

    def notice(self, node_id: str) -> Future[float]:
        return self._notices.setdefault(node_id, Future())


def connect(cluster: Cluster, client: str, record: ReplicaRecord, silence_timeout_s: float) -> ReplicaClient:
    """Return a client of a replica, over the simulated network."""
    replica = cluster.live.get(record.replica_id)
    server = Server(record.replica_id, lambda identity, frame: None) if replica is None else replica.server
    if replica is None:
        server.is_up = False
    return ReplicaClient(
        record.endpoint,
        record.replica_id,
        silence_timeout_s=silence_timeout_s,
        heartbeat_s=HEARTBEAT_S,
        load_only=client == "controller",
        connection=SimulatedConnection(cluster.network, client, server),
    )


class SimulatedCalls(BlockingCalls):
    """See `BlockingCalls`: calls take simulated time, and launches end with the controller's process."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._is_closed = False

    async def call(self, what: str, function: Callable[..., T], *arguments: object) -> T:
        await asyncio.sleep(self._rng.uniform(0.001, 0.05))
        return function(*arguments)

    remove = call

    def launch(self, function: Callable[[], T]) -> Future[T]:
        launched: Future[T] = Future()
        asyncio.get_running_loop().call_later(self._rng.uniform(*LAUNCH_S), self._run, function, launched)
        return launched

    def _run(self, function: Callable[[], T], launched: Future[T]) -> None:
        if self._is_closed:
            return
        try:
            launched.set_result(function())
        except Exception as error:
            launched.set_exception(error)

    def close(self) -> None:
        self._is_closed = True


def wall_clock() -> float:
    """Return the simulated Unix time."""
    return START + asyncio.get_running_loop().time()
