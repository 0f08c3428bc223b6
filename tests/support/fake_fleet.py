"""Fakes of the fleet's interfaces: replicas are step loops on threads, whose outputs `fakes.oracle` predicts."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from fake_kv_peer import FakeKvNetwork, FakeKvPeer
from fakes import FakeWorkerGroup, small_config

from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.controller.controller_client import decode_statuses
from quire.cluster.fleet.controller.fleet import Fleet
from quire.cluster.fleet.controller.fleet_state import Demand, FleetCommand, FleetState, NodeEntry
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.fleet.replica.launch_progress import LaunchProgress, LaunchStage, OnProgress
from quire.cluster.fleet.replica.record import ReplicaRecord
from quire.cluster.fleet.replica.supervised_replica import LiveReplica
from quire.proto.errors import QuireError, ReplicaUnavailable
from quire.proto.replica_status import ReplicaStatus
from quire.proto.step import StepPlan, StepResult
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import StepLoop
from quire.scheduler.service.zmq_mailbox import ZmqMailbox

DEADLINE_S = 60.0


class SlowWorkers(FakeWorkerGroup):
    """Fake ranks whose steps take time, so that a test can interfere.

    Attributes:
        error: raised by the next step, or without a step at once; None if they succeed.
        step_error: raised by the next step.
    """

    step_s = 0.004
    error: QuireError | None = None
    step_error: QuireError | None = None

    def gather(self, timeout_s: float) -> StepResult:
        time.sleep(self.step_s)
        self.check()
        if self.step_error is not None:
            raise self.step_error
        return super().gather(timeout_s)

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if self.kv_peer is None:
            return result
        for pull_id in list(self.kv_peer.pulls):
            self.kv_peer.read(pull_id)
        # The times that are reported: chunks of prompts delay those that generate.
        return replace(result, stage_times={"forward": self.step_s * (1.0 if plan.chunk_rows.size else 0.1)})

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class FakeReplica:
    """See `supervised_replica.LiveReplica`.

    Args:
        role: of the replica.
        moves_kv: its KV travels over the network, as that of a replica of one role always does.
    """

    def __init__(
        self,
        record: ReplicaRecord,
        num_blocks: int,
        role: str = "both",
        network: FakeKvNetwork | None = None,
        *,
        moves_kv: bool = False,
    ) -> None:
        moves_kv = moves_kv or role != "both"
        config = small_config(
            num_blocks=num_blocks, block_size=16, max_model_len=512, max_num_batched_tokens=64, role=role,
            kv_transfer=moves_kv,
        )  # fmt: skip
        self.record = record
        self.failure: Future[QuireError | None] = Future()
        self._is_closed = False
        group = self.group = SlowWorkers(config)
        if network is not None and moves_kv:
            group.kv_peer = FakeKvPeer(network, record.replica_id, lambda: group.kv)
        self._mailbox = ZmqMailbox(record.endpoint)
        self._loop = StepLoop(Scheduler(config), self.group, self._mailbox, record.replica_id)
        self._thread = threading.Thread(target=self._run, name=record.replica_id, daemon=True)
        self._thread.start()

    @property
    def replica_id(self) -> str:
        return self.record.replica_id

    def kill(self, reason: str) -> None:
        """End the replica with an error."""
        self.group.error = ReplicaUnavailable(reason)

    def kill_in_step(self, reason: str) -> None:
        """End the replica with an error while it computes a request."""
        self.group.step_error = ReplicaUnavailable(reason)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.stop()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"the step loop did not end in {DEADLINE_S:g} s"
        self._mailbox.close()

    def _run(self) -> None:
        error = None
        try:
            self._loop.run()
        except QuireError as raised:
            error = raised
        if not self.failure.done():
            self.failure.set_result(error)


class FakeLauncher:
    """See `interfaces.Launcher`. Every replica has a node of its own, `node-0` for the first.

    Attributes:
        room: replicas that fit; further launches report that they wait for room.
        problem: raised by launches; None if they succeed.
        replaces_schedulers: a replica whose scheduler ended gets another one.
        may_place: launches wait for this event before they start anything.
        num_failing_removals: this many of the next removals raise.
        launched: replica_id |-> every replica that was launched.
        peers: replica_id |-> the replicas that were named for its weights.
        draining: node_id |-> Unix time of its end (0 if unknown), of the nodes that Ray drains.
        cordoned: node ids that `cordon` was called with.
        notices: node_id |-> its future notice.
        removed: replica ids that `remove` was called with.
    """

    def __init__(self, room: int = 8, num_blocks: int = 64) -> None:
        self.room = room
        self.problem: QuireError | None = None
        self.replaces_schedulers = False
        self.may_place = threading.Event()
        self.may_place.set()
        self.num_failing_removals = 0
        self.launched: dict[str, FakeReplica] = {}
        self.peers: dict[str, tuple[str, ...]] = {}
        self.draining: dict[str, float] = {}
        self.cordoned: list[str] = []
        self.notices: dict[str, Future[float]] = {}
        self.removed: list[str] = []
        self._num_blocks = num_blocks
        self._network = FakeKvNetwork()
        self._nodes = itertools.count()
        self._directory = tempfile.TemporaryDirectory(prefix="quire-")
        self._changed = threading.Condition()
        self._live: dict[str, FakeReplica] = {}

    def launch(
        self, deployment: Deployment, replica_id: str, on_progress: OnProgress, peers: Sequence[str] = ()
    ) -> FakeReplica:
        assert self.may_place.wait(DEADLINE_S), "the test did not set may_place"
        self.peers[replica_id] = tuple(peers)
        with self._changed:
            on_progress(LaunchProgress(LaunchStage.PLACING))
            while len(self._live) >= self.room:
                on_progress(LaunchProgress(LaunchStage.WAITING_FOR_ROOM, f"{self.room} fit"))
                self._changed.wait(0.05)
            if self.problem is not None:
                raise self.problem
            on_progress(LaunchProgress(LaunchStage.LOADING, deployment.name))
            record = ReplicaRecord(
                replica_id=replica_id,
                model=deployment.name,
                version=deployment.version,
                endpoint=f"ipc://{self._directory.name}/{replica_id}",
                num_kv_blocks=self._num_blocks,
                namespace="fake",
                node_ids=(f"node-{next(self._nodes)}",),
                pids=(1,),
            )
            replica = self._live[replica_id] = self.launched[replica_id] = FakeReplica(
                record,
                self._num_blocks,
                deployment.engine.role,
                self._network,
                moves_kv=deployment.engine.kv_transfer,
            )
            return replica

    def adopt(self, record: ReplicaRecord) -> FakeReplica:
        replica = self._live.get(record.replica_id)
        if replica is None:
            raise ReplicaUnavailable(f"{record.replica_id} does not run any more")
        return replica

    def replace_scheduler(self, live: LiveReplica, number: int) -> FakeReplica:
        """Start the replica again at another endpoint. Raises `problem` if it is set."""
        if not self.replaces_schedulers:
            raise ReplicaUnavailable("no rank answers")
        if self.problem is not None:
            raise self.problem
        assert isinstance(live, FakeReplica)
        live.close()
        record = replace(live.record, endpoint=f"ipc://{self._directory.name}/{live.replica_id}.{number}")
        with self._changed:
            replica = self._live[live.replica_id] = self.launched[live.replica_id] = FakeReplica(
                record, self._num_blocks
            )
        return replica

    def remove(self, replica_id: str) -> None:
        with self._changed:
            if self.num_failing_removals:
                self.num_failing_removals -= 1
                raise ConnectionError("the Ray head node is not reachable")
            self.removed.append(replica_id)
            replica = self._live.pop(replica_id, None)
            self._changed.notify_all()
        if replica is not None:
            replica.close()

    def known(self) -> set[str]:
        return set(self._live)

    def nodes(self) -> tuple[NodeEntry, ...]:
        return tuple(
            NodeEntry(
                node_id,
                "127.0.0.1",
                is_draining=node_id in self.draining,
                gone_at=self.draining.get(node_id, 0.0),
            )
            for replica in self._live.values()
            for node_id in replica.record.node_ids
        )

    def cordon(self, node_id: str) -> None:
        self.cordoned.append(node_id)

    def connect(self, record: ReplicaRecord, silence_timeout_s: float = 60.0) -> ReplicaClient:
        return ReplicaClient(
            record.endpoint,
            record.replica_id,
            silence_timeout_s=silence_timeout_s,
            heartbeat_s=0.05,
            load_only=True,
        )

    def notice(self, node_id: str) -> Future[float]:
        return self.notices.setdefault(node_id, Future())

    def close(self) -> None:
        for replica_id in list(self._live):
            self.remove(replica_id)
        self._directory.cleanup()


class DirectController:
    """See `controller_client.Controller`: calls a Fleet in the same event loop.

    Attributes:
        fleet: None while the controller is away.
    """

    def __init__(self, fleet: Fleet | None) -> None:
        self.fleet = fleet

    async def keys(self) -> None:
        return None

    async def watch(self, gateway_id: str, since: str, timeout_s: float) -> FleetState | None:
        return await self._reachable_fleet().watch(since, min(timeout_s, 1.0))

    async def statuses(self) -> list[ReplicaStatus]:
        return decode_statuses(self._reachable_fleet().statuses())

    async def report(self, gateway_id: str, demand: Mapping[str, Demand]) -> None:
        self._reachable_fleet().report(gateway_id, demand)

    async def apply(self, command: FleetCommand) -> Mapping[str, Any]:
        return await self._reachable_fleet().apply(command)

    def _reachable_fleet(self) -> Fleet:
        if self.fleet is None:
            raise ReplicaUnavailable("the fleet's controller is away")
        return self.fleet
