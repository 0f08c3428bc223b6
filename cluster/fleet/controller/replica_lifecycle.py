"""ReplicaLifecycle: one replica from its launch or adoption to its end.

    STARTING ──canary──► READY ──drain──► DRAINING ──empty──► STOPPED
        └──stop─────────────────────────────┘ (with nothing to drain)

Every state can change to FAILED. In every case the replica's processes are removed at the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from ....proto.errors import QuireError, ReplicaUnavailable
from ....proto.replica_status import ReplicaStatus
from ....proto.stream import Drain
from ...config.deployment import Deployment
from ...os_utils.backoff import Backoff
from ...os_utils.event_loop import run_in_background
from ..replica.canary import run_canary
from ..replica.client import SILENCE_MARGIN_S, ReplicaClient
from ..replica.launch_progress import LaunchProgress, LaunchStage
from ..replica.record import ReplicaRecord
from ..replica.supervised_replica import LiveReplica, SupervisedReplica
from .fleet_state import ReplicaEntry, ReplicaState
from .interfaces import CALL_TIMEOUT_S, BlockingCalls, FleetStore, Launcher
from .reconcile import ReplicaView

# Time beyond its grace period after which a draining replica is ended with the requests that it still has.
DRAIN_SLACK_S = 10.0
# A replica that was ready for this long counts as proof that its version can run.
STABLE_AFTER_S = 60.0
# Delays between attempts to remove a replica.
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LifecycleContext:
    """Dependencies shared by the replicas of a fleet.

    Attributes:
        clock: monotonic time in seconds.
        canary_timeout_s: how long the first token of a replica may take.
        on_state: called when a replica's state changed.
        on_progress: called when a starting replica's `reason` changed.
    """

    launcher: Launcher
    store: FleetStore
    blocking: BlockingCalls
    clock: Callable[[], float]
    canary_timeout_s: float
    on_state: Callable[[ReplicaLifecycle], None]
    on_progress: Callable[[], None]


class ReplicaLifecycle:
    """One replica, from `launch` or `adopt` on. For one event loop.

    Attributes:
        model, role, version: of its deployment, which computes them: 0.4 ms, in each step of the controller.
        started_at: when this object was made.
        ready_at: when its canary passed; None before that.
        drain_by: when the replica must drain at the latest; None if it may stay.
        drain_reason: why it must drain.
        is_adopted: an earlier controller launched the replica.
    """

    def __init__(self, replica_id: str, deployment: Deployment, context: LifecycleContext) -> None:
        self.replica_id = replica_id
        self.deployment = deployment
        self.model, self.role, self.version = deployment.name, deployment.engine.role, deployment.version
        self.started_at = context.clock()
        self.state = ReplicaState.STARTING
        self.reason = ""
        self.ready_at: float | None = None
        self.drain_by: float | None = None
        self.drain_reason = ""
        self.is_adopted = False
        self._context = context
        self._no_room_since: float | None = None
        self._is_canceled = False
        self._must_drain = asyncio.Event()
        self._launching: Future[LiveReplica] | None = None  # the latest launch or replacement
        self._replica: SupervisedReplica[LiveReplica] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def status(self) -> ReplicaStatus | None:
        """The replica's latest status, or None before the first."""
        return None if self._replica is None else self._replica.client.latest_status

    @property
    def node_ids(self) -> tuple[str, ...]:
        return () if self._replica is None else self._replica.live.record.node_ids

    @property
    def has_ended(self) -> bool:
        """The replica has been removed, or its lifecycle detached."""
        return bool(self._tasks) and all(task.done() for task in self._tasks)

    def is_stable(self, now: float) -> bool:
        """Return whether the replica became ready at least STABLE_AFTER_S ago."""
        return self.ready_at is not None and now - self.ready_at >= STABLE_AFTER_S

    def view(self) -> ReplicaView:
        """Return the replica as `reconcile.plan` sees it."""
        status = self.status
        return ReplicaView(
            self.replica_id,
            self.version,
            self.state,
            self.started_at,
            0 if status is None else status.num_running + status.num_waiting,
            self.drain_by,
            self._no_room_since,
            self.is_adopted,
        )

    def entry(self) -> ReplicaEntry:
        """Return the replica as gateways and operators see it."""
        return ReplicaEntry(
            self.replica_id,
            self.model,
            self.version,
            self.state,
            self.reason,
            None if self._replica is None else self._replica.live.record,
            self.drain_reason if self.state is ReplicaState.READY else "",
        )

    def launch(self, peers: Sequence[str] = ()) -> None:
        """Begin to launch the replica's processes; `peers` as for Launcher.launch."""
        loop = asyncio.get_running_loop()

        def on_progress(progress: LaunchProgress) -> None:
            if self._is_canceled:
                raise ReplicaUnavailable(f"the launch of {self.replica_id} was canceled")
            loop.call_soon_threadsafe(self._on_progress, progress)

        launcher = self._context.launcher
        self._begin(lambda: launcher.launch(self.deployment, self.replica_id, on_progress, peers))

    def adopt(self, record: ReplicaRecord) -> None:
        """Begin to take over a running replica."""
        self.is_adopted, self.reason = True, "is adopted"
        self._begin(lambda: self._context.launcher.adopt(record))

    def require_drain(self, by: float, reason: str) -> None:
        """Set the time by which the replica must drain, unless an earlier one is set."""
        if self.drain_by is None or by < self.drain_by:
            self.drain_by, self.drain_reason = by, reason
            self._context.on_progress()

    def cancel_drain(self) -> bool:
        """Let a ready replica that must drain stay. Returns False if it must not drain, or drains already."""
        if self.drain_by is None or self.state is not ReplicaState.READY:
            return False
        self.drain_by, self.drain_reason = None, ""
        return True

    def drain(self, reason: str) -> None:
        """Drain the replica and then end it; a replica that is not ready yet is stopped."""
        if self.state is ReplicaState.READY:
            self._set_state(ReplicaState.DRAINING, reason)
            self._must_drain.set()
        else:
            self.stop(reason)

    def stop(self, reason: str) -> None:
        """End a replica that is not ready yet."""
        if self.state is ReplicaState.STARTING:
            self._set_state(ReplicaState.DRAINING, reason)
            self._is_canceled = True
            self._tasks[0].cancel()

    async def detach(self) -> None:
        """Stop managing the replica: if it runs, it keeps running; if it launches, the launch is canceled."""
        self._is_canceled = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._replica is not None:
            await self._replica.close()

    def _begin(self, make: Callable[[], LiveReplica]) -> None:
        self._launching = self._context.blocking.launch(lambda: self._make_and_record(make))
        serving = asyncio.create_task(self._serve(asyncio.wrap_future(self._launching)))
        finishing = run_in_background(self._finish(serving), f"managing {self.replica_id}")
        self._tasks = [serving, finishing]

    def _make_and_record(self, make: Callable[[], LiveReplica]) -> LiveReplica:
        """Runs in a thread. The record is stored first, so that a restarted controller finds the replica."""
        live = make()
        self._context.store.write_replica(self.deployment, live.record)
        return live

    def _on_progress(self, progress: LaunchProgress) -> None:
        if self.state is not ReplicaState.STARTING:
            return
        if progress.stage is not LaunchStage.WAITING_FOR_ROOM:
            self._no_room_since = None
        elif self._no_room_since is None:
            self._no_room_since = self._context.clock()
        self.reason = str(progress)
        self._context.on_progress()

    async def _finish(self, serving: asyncio.Task[None]) -> None:
        """Remove the replica after it drained, was stopped or failed."""
        await asyncio.wait((serving,))
        error = None if serving.cancelled() else serving.exception()
        if error is not None:
            self._on_failure(error)
        await self._remove_with_retries()
        if self.state is not ReplicaState.FAILED:
            self._set_state(ReplicaState.STOPPED, self.reason)

    async def _serve(self, launched: asyncio.Future[LiveReplica]) -> None:
        """From the launch until the replica has drained."""
        replica = self._replica = SupervisedReplica(
            await launched, self._connect, self._replace_scheduler, self._context.clock
        )
        if await self._is_draining_already(replica.client):
            self._set_state(ReplicaState.DRAINING, "the replica was draining when it was adopted")
        else:
            self._on_progress(LaunchProgress(LaunchStage.CANARY))
            await run_canary(replica.client, self._context.canary_timeout_s)
            self.ready_at = self._context.clock()
            self._set_state(ReplicaState.READY, "")
            while (error := await self._failure_before_drain(replica)) is not None:
                await replica.replace_scheduler(error)
                self._context.on_state(self)  # gateways connect to the new endpoint, and send canaries
        await self._drain_requests(replica.client)

    def _connect(self, record: ReplicaRecord) -> ReplicaClient:
        silence_timeout_s = self.deployment.engine.step_timeout_s + SILENCE_MARGIN_S
        return self._context.launcher.connect(record, silence_timeout_s)

    async def _replace_scheduler(self, live: LiveReplica, number: int) -> LiveReplica:
        launcher = self._context.launcher
        self._launching = self._context.blocking.launch(
            lambda: self._make_and_record(lambda: launcher.replace_scheduler(live, number))
        )  # a removal waits for its end
        return await asyncio.wrap_future(self._launching)

    async def _is_draining_already(self, client: ReplicaClient) -> bool:
        """Return whether an adopted replica was draining when its last controller died."""
        return self.is_adopted and (await client.status(self._context.canary_timeout_s)).draining

    async def _failure_before_drain(self, replica: SupervisedReplica[LiveReplica]) -> QuireError | None:
        """Wait until the replica fails, or must drain; return why it failed, or None if it must drain."""
        failed = asyncio.ensure_future(replica.wait_until_failed())
        must_drain = asyncio.ensure_future(self._must_drain.wait())
        try:
            await asyncio.wait((failed, must_drain), return_when=asyncio.FIRST_COMPLETED)
            return None if must_drain.done() else failed.result()
        finally:
            failed.cancel()
            must_drain.cancel()

    async def _drain_requests(self, client: ReplicaClient) -> None:
        """Return once the replica has no requests and its KV was read, or DRAIN_SLACK_S after its grace period."""
        grace_s, clock = self.deployment.drain_grace_s, self._context.clock
        client.send(Drain(grace_s))
        deadline = clock() + grace_s + DRAIN_SLACK_S
        with suppress(ReplicaUnavailable):  # a replica that has ended has no requests either
            while clock() < deadline:
                status = await client.status(DRAIN_SLACK_S)
                if status.num_running + status.num_waiting + status.num_kv_leases == 0:
                    return
                await client.next_status(DRAIN_SLACK_S)

    def _on_failure(self, error: BaseException) -> None:
        if not isinstance(error, QuireError):
            _log.error("managing %s failed unexpectedly", self.replica_id, exc_info=error)
            error = ReplicaUnavailable(f"the controller failed on this replica: {error!r}")
        self._set_state(ReplicaState.FAILED, str(error))

    async def _remove_with_retries(self) -> None:
        """Remove the replica, with unlimited attempts: its resources would be lost to the fleet otherwise."""
        backoff = Backoff(FIRST_RETRY_S, MAX_RETRY_S)
        while True:
            try:
                await self._remove()
                return
            except Exception:
                retry_s = backoff.fail(self._context.clock())
                _log.exception("removing %s failed; next attempt in %g s", self.replica_id, retry_s)
            await asyncio.sleep(retry_s)

    async def _remove(self) -> None:
        context, name = self._context, self.replica_id
        remove = context.blocking.remove
        if self._replica is not None:
            await self._replica.close()
            await remove(f"closing {name}", self._replica.live.close)
        await remove(f"removing {name}", context.launcher.remove, name)
        await self._wait_for_launch_end()
        await context.blocking.call(f"deleting the record of {name}", context.store.delete_replica, name)

    async def _wait_for_launch_end(self) -> None:
        """Wait until a canceled launch has ended; it fails as soon as its processes have been removed."""
        assert self._launching is not None
        launched = asyncio.wrap_future(self._launching)
        await asyncio.wait((launched,), timeout=CALL_TIMEOUT_S)
        if not launched.done():
            raise ReplicaUnavailable(
                f"the launch of {self.replica_id} has not ended {CALL_TIMEOUT_S:g} s after its removal"
            )
        if not launched.cancelled():
            launched.exception()  # already reported; asyncio must not log it again

    def _set_state(self, state: ReplicaState, reason: str) -> None:
        level = logging.WARNING if state is ReplicaState.FAILED else logging.INFO
        _log.log(level, "%s is %s%s", self.replica_id, state, f": {reason}" if reason else "")
        self.state, self.reason = state, reason
        self._context.on_state(self)
