"""ReplicaLifecycle: one replica from its launch, or from when it was found again, to its end.

    STARTING ──canary──► READY ──drain──► DRAINING ──empty──► STOPPED
        └──stop─────────────────────────────┘ (with nothing to empty)

From each of them FAILED. Whatever happened, at the end nothing is left of its processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from ...proto.errors import QuireError, ReplicaUnavailable
from ...proto.stream import Drain, ReplicaStatus
from ..config.deployment import Deployment
from ..controller_api.fleet_state import ReplicaEntry, ReplicaState
from ..host.background import run_in_background
from ..host.backoff import Backoff
from ..replica.canary import run_canary
from ..replica.client import PATIENCE_S, ReplicaClient
from ..replica.launch_progress import LaunchProgress, LaunchStage
from ..replica.replica import ReplicaRecord
from .blocking_calls import CALL_TIMEOUT_S, BlockingCalls
from .fleet_store import FleetStore
from .interfaces import Launcher, LiveReplica
from .reconcile import ReplicaView

# Beyond its grace, before a draining replica is ended with what it still has.
DRAIN_SLACK_S = 10.0
# After so long without a failure, a replica is proof that its version can run.
PROVEN_AFTER_S = 60.0
# Between attempts to end a replica.
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LifecycleContext:
    """What the lives of a fleet's replicas share.

    Attributes:
        clock: seconds that only grow.
        canary_timeout_s: how long the first token of a replica may take.
        on_state: a replica has come to another state.
        on_progress: something else has changed that is told of replicas.
    """

    launcher: Launcher
    memory: FleetStore
    threads: BlockingCalls
    clock: Callable[[], float]
    canary_timeout_s: float
    on_state: Callable[[ReplicaLifecycle], None]
    on_progress: Callable[[], None]


class ReplicaLifecycle:
    """For one event loop; `launch` or `adopt` begins it.

    Attributes:
        since: when it began.
        ready_at: when its canary passed; None: it has not.
        leave_by: its node goes away or an operator wants it empty: when it must drain at the latest; None: it may
            stay.
        leave_reason: why.
        is_adopted: an earlier controller launched it.
    """

    def __init__(self, replica_id: str, deployment: Deployment, surroundings: LifecycleContext) -> None:
        self.replica_id = replica_id
        self.deployment = deployment
        self.since = surroundings.clock()
        self.state = ReplicaState.STARTING
        self.reason = ""
        self.ready_at: float | None = None
        self.leave_by: float | None = None
        self.leave_reason = ""
        self.is_adopted = False
        self._around = surroundings
        self._no_room_since: float | None = None
        self._is_given_up = False
        self._must_drain = asyncio.Event()
        self._launching: Future[LiveReplica] | None = None
        self._live: LiveReplica | None = None
        self._client: ReplicaClient | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def status(self) -> ReplicaStatus | None:
        """What it said last; None: nothing yet."""
        return None if self._client is None else self._client.latest

    @property
    def node_ids(self) -> tuple[str, ...]:
        return () if self._live is None else self._live.record.node_ids

    @property
    def is_over(self) -> bool:
        """Nothing is left of it."""
        return bool(self._tasks) and all(task.done() for task in self._tasks)

    def is_proven(self, now: float) -> bool:
        """It has served for a while: its version can run here."""
        return self.ready_at is not None and now - self.ready_at >= PROVEN_AFTER_S

    def standing(self) -> ReplicaView:
        status = self.status
        return ReplicaView(
            self.replica_id,
            self.deployment.version,
            self.state,
            self.since,
            0 if status is None else status.num_running + status.num_waiting,
            self.leave_by,
            self._no_room_since,
        )

    def entry(self) -> ReplicaEntry:
        return ReplicaEntry(
            self.replica_id,
            self.deployment.name,
            self.deployment.version,
            self.state,
            self.reason,
            None if self._live is None else self._live.record,
        )

    def launch(self) -> None:
        """Has its processes started."""
        loop = asyncio.get_running_loop()

        def tell(progress: LaunchProgress) -> None:
            if self._is_given_up:
                raise ReplicaUnavailable(f"{self.replica_id} is not wanted any more")
            loop.call_soon_threadsafe(self._note_progress, progress)

        self._begin(lambda: self._around.launcher.launch(self.deployment, self.replica_id, tell))

    def adopt(self, record: ReplicaRecord) -> None:
        """Has its processes found again."""
        self.is_adopted, self.reason = True, "is adopted"
        self._begin(lambda: self._around.launcher.adopt(record))

    def leave(self, by: float, reason: str) -> None:
        """It must have drained by then, or earlier where that was said before."""
        if self.leave_by is None or by < self.leave_by:
            self.leave_by, self.leave_reason = by, reason

    def drain(self, reason: str) -> None:
        """Empties it and then ends it; one that has not come to serve is ended as it is."""
        if self.state is ReplicaState.READY:
            self._enter(ReplicaState.DRAINING, reason)
            self._must_drain.set()
        else:
            self.stop(reason)

    def stop(self, reason: str) -> None:
        """Ends a replica that has not come to serve."""
        if self.state is ReplicaState.STARTING:
            self._enter(ReplicaState.DRAINING, reason)
            self._is_given_up = True
            self._tasks[0].cancel()

    async def abandon(self) -> None:
        """Looks after it no longer: one that serves goes on, one that is not launched yet is not launched."""
        self._is_given_up = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def _begin(self, make: Callable[[], LiveReplica]) -> None:
        self._launching = self._around.threads.launch(lambda: self._make(make))
        serving = asyncio.create_task(self._serve(asyncio.wrap_future(self._launching)))
        ending = run_in_background(self._see_through(serving), f"the upkeep of {self.replica_id}")
        self._tasks = [serving, ending]

    def _make(self, make: Callable[[], LiveReplica]) -> LiveReplica:
        """In a thread. What there is can be found again before anything else is done with it."""
        live = make()
        self._around.memory.keep_replica(self.deployment, live.record)
        return live

    def _note_progress(self, progress: LaunchProgress) -> None:
        if self.state is not ReplicaState.STARTING:
            return
        if progress.stage is not LaunchStage.WAITING_FOR_ROOM:
            self._no_room_since = None
        elif self._no_room_since is None:
            self._no_room_since = self._around.clock()
        self.reason = str(progress)
        self._around.on_progress()

    async def _see_through(self, serving: asyncio.Task[None]) -> None:
        """Sees to its end, whatever it came of: it was drained, given up, or has failed."""
        await asyncio.wait((serving,))
        error = None if serving.cancelled() else serving.exception()
        if error is not None:
            self._fail(error)
        await self._end()
        if self.state is not ReplicaState.FAILED:
            self._enter(ReplicaState.STOPPED, self.reason)

    async def _serve(self, launched: asyncio.Future[LiveReplica]) -> None:
        """From its launch until it is empty."""
        self._live = await launched
        patience_s = self.deployment.engine.step_timeout_s + PATIENCE_S
        client = self._client = self._around.launcher.connect(self._live.record, patience_s)
        client.start()
        client.watch(self._live.failure)
        if await self._drains_already(client):
            self._enter(ReplicaState.DRAINING, "it drained already when it was adopted")
        else:
            self._note_progress(LaunchProgress(LaunchStage.PROVING))
            await run_canary(client, self._around.canary_timeout_s)
            self.ready_at = self._around.clock()
            self._enter(ReplicaState.READY, "")
            await self._until_drained_or_failed(client)
        await self._empty(client)

    async def _drains_already(self, client: ReplicaClient) -> bool:
        """An adopted replica may have been draining when its controller died."""
        return self.is_adopted and (await client.status(self._around.canary_timeout_s)).draining

    async def _until_drained_or_failed(self, client: ReplicaClient) -> None:
        """Returns once it is to drain. Raises ReplicaUnavailable once it has failed."""
        failed = asyncio.ensure_future(client.wait_until_failed())
        drained = asyncio.ensure_future(self._must_drain.wait())
        try:
            await asyncio.wait((failed, drained), return_when=asyncio.FIRST_COMPLETED)
            if not drained.done():
                raise ReplicaUnavailable(failed.result())
        finally:
            failed.cancel()
            drained.cancel()

    async def _empty(self, client: ReplicaClient) -> None:
        """Drains the replica: returns once it has no requests, or kept them too long."""
        grace_s, clock = self.deployment.drain_grace_s, self._around.clock
        client.send(Drain(grace_s))
        deadline = clock() + grace_s + DRAIN_SLACK_S
        with suppress(ReplicaUnavailable):  # it is gone: then it has no requests either
            while clock() < deadline:
                status = await client.status(DRAIN_SLACK_S)
                if status.num_running + status.num_waiting == 0:
                    return
                await client.next_status(DRAIN_SLACK_S)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, QuireError):
            _log.error("the upkeep of %s failed", self.replica_id, exc_info=error)
            error = ReplicaUnavailable(f"its upkeep failed: {error!r}")
        self._enter(ReplicaState.FAILED, str(error))

    async def _end(self) -> None:
        """Leaves nothing of it, however often that has to be tried: what it holds would be lost to the fleet."""
        backoff = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S)
        while True:
            try:
                await self._remove()
                return
            except Exception:
                retry_s = backoff.fail(self._around.clock())
                _log.exception("%s could not be ended; it is tried again in %g s", self.replica_id, retry_s)
            await asyncio.sleep(retry_s)

    async def _remove(self) -> None:
        call, around, name = self._around.threads.call, self._around, self.replica_id
        if self._client is not None:
            await self._client.close()
        if self._live is not None:
            await call(f"closing {name}", self._live.close)
        await call(f"removing {name}", around.launcher.remove, name)
        await self._until_launch_ended()
        await call(f"forgetting {name}", around.memory.forget_replica, name)

    async def _until_launch_ended(self) -> None:
        """A launch that was given up ends with what was removed under it."""
        assert self._launching is not None
        launched = asyncio.wrap_future(self._launching)
        await asyncio.wait((launched,), timeout=CALL_TIMEOUT_S)
        if not launched.done():
            raise ReplicaUnavailable(f"the launch of {self.replica_id} goes on after {CALL_TIMEOUT_S:g} s")
        if not launched.cancelled():
            launched.exception()  # it has been told of

    def _enter(self, state: ReplicaState, reason: str) -> None:
        level = logging.WARNING if state is ReplicaState.FAILED else logging.INFO
        _log.log(level, "%s is %s%s", self.replica_id, state, f": {reason}" if reason else "")
        self.state, self.reason = state, reason
        self._around.on_state(self)
