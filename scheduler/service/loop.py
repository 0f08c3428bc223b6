"""StepLoop: messages in, plans out, results in, news out. A replica's heartbeat."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...proto.errors import QuireError, ReplicaUnavailable
from ...proto.stream import (
    Abort,
    CacheQuery,
    Drain,
    Finish,
    FinishReason,
    GatewayMessage,
    ReplicaStatus,
    StatusQuery,
    Stop,
    Submit,
    TokenBatch,
)
from ..core.result_processor import News
from ..core.scheduler import Scheduler
from .mailbox import Mailbox
from .worker_group import WorkerGroup

# An idle loop wakes this often to ask whether every rank is alive.
IDLE_CHECK_S = 1.0
# Most of them are gone for good.
MAX_UNTOLD_GATEWAYS = 64

_log = logging.getLogger(__name__)


class StepLoop:
    """Drives one scheduler and its ranks.

    Args:
        clock: seconds that only grow; the scheduler knows no other time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        group: WorkerGroup,
        mailbox: Mailbox,
        replica_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = scheduler.config
        self._scheduler = scheduler
        self._group = group
        self._mailbox = mailbox
        self._replica_id = replica_id
        self._clock = clock
        self._started_at = clock()
        self._stopping = threading.Event()
        # gateway |-> handles that were ended when it could not be told.
        self._untold: dict[bytes, list[int]] = {}
        # Whether nothing is in flight for want of requests, and the latest step that came after such a time.
        self._is_idle = True
        self._step_after_idle = 0

    def run(self) -> None:
        """Serves until `stop`. Whatever ends it, every gateway is told first.

        Raises:
            RankFailed: a rank died, hung or diverged.
        """
        try:
            while not self._stopping.is_set():
                busy = self.step()
                self._take_messages(0.0 if busy else IDLE_CHECK_S)
        except QuireError as error:
            self._give_up(error)
            raise
        except Exception as error:
            self._give_up(
                ReplicaUnavailable(f"the scheduler of replica {self._replica_id} failed: {error!r}")
            )
            raise
        self._give_up(ReplicaUnavailable(f"replica {self._replica_id} is shutting down"))

    def stop(self) -> None:
        """Ends `run` after the present step; from any thread."""
        self._stopping.set()
        self._mailbox.wake()

    def step(self) -> bool:
        """Plans and broadcasts while there is room in flight, then takes in one result; False: nothing to do."""
        scheduler, limits = self._scheduler, self._config.scheduler
        while scheduler.num_in_flight < limits.max_steps_in_flight:
            plan = scheduler.schedule(self._clock())
            if plan is None:
                break
            if self._is_idle:
                self._step_after_idle, self._is_idle = plan.step_id, False
            self._group.broadcast(plan)
        self._tell(scheduler.take_news())
        if not scheduler.num_in_flight:
            self._is_idle = True
            self._group.check()
            return False
        result = self._group.gather(limits.step_timeout_s)
        if result.step_id != self._step_after_idle:
            scheduler.stats.count_gap(result.stage_times.get("wait", 0.0))
        self._tell(scheduler.apply(result, self._clock()))
        if limits.audit:
            scheduler.check_integrity()
        return True

    def _take_messages(self, timeout_s: float) -> None:
        for gateway, message in self._mailbox.receive(timeout_s):
            self._take(gateway, message)

    def _take(self, gateway: bytes, message: GatewayMessage) -> None:
        if gateway in self._untold:
            self._tell_late(gateway)
        match message:
            case Submit():
                self._tell_end(gateway, self._scheduler.add(gateway, message, self._clock()))
            case Abort():
                self._scheduler.abort(gateway, message.handle)
            case Stop():
                self._tell_end(gateway, self._scheduler.stop(gateway, message.handle, self._clock()))
            case StatusQuery():
                self._mailbox.send(gateway, self.status(message.query_id))
            case CacheQuery():
                self._mailbox.send(gateway, self._scheduler.blocks.journal.report(message.since))
            case Drain():
                _log.info("%s drains: running sequences have %g s", self._replica_id, message.grace_s)
                self._scheduler.drain(message.grace_s, self._clock())

    def _tell_end(self, gateway: bytes, finish: Finish | None) -> None:
        if finish is not None:
            self._tell([(gateway, TokenBatch(0, finished=(finish,)))])

    def _tell(self, news: News) -> None:
        for gateway, batch in news:
            if not self._mailbox.send(gateway, batch):
                _log.warning("gateway %s is gone or does not read: its requests are ended", gateway.hex())
                self._drop(gateway, batch)

    def _drop(self, gateway: bytes, unsent: TokenBatch) -> None:
        """Ends the requests of a gateway that cannot be told of them; it is, should it speak again."""
        handles = [finish.handle for finish in unsent.finished] + self._scheduler.drop_gateway(gateway)
        self._untold[gateway] = self._untold.pop(gateway, []) + handles
        if len(self._untold) > MAX_UNTOLD_GATEWAYS:
            del self._untold[next(iter(self._untold))]

    def _tell_late(self, gateway: bytes) -> None:
        """Tells a gateway that was taken for dead what was ended meanwhile: it would wait for it for ever."""
        reason = ReplicaUnavailable(f"{self._replica_id} ended it: its gateway did not take its answers")
        ends = tuple(
            Finish(handle, FinishReason.ERROR, grpc_status=reason.grpc_status, error=str(reason))
            for handle in self._untold[gateway]
        )
        if self._mailbox.send(gateway, TokenBatch(0, finished=ends)):
            del self._untold[gateway]

    def _give_up(self, error: QuireError) -> None:
        """Ends every request and tells its gateway.

        After a fault of our own nothing need be in order any more: whatever can still be told is.
        """
        with self._noting_faults():
            self._take_messages(0.0)  # what came in the meantime is to be told as well
        with self._noting_faults():
            self._send(self._scheduler.fail_all(error))
        with self._noting_faults():
            self._send(self._scheduler.take_news())

    def _send(self, news: News) -> None:
        for gateway, batch in news:
            self._mailbox.send(gateway, batch)

    @contextmanager
    def _noting_faults(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            _log.exception("%s could not end in order", self._replica_id)

    def status(self, query_id: int = 0, problem: str = "") -> ReplicaStatus:
        """The replica's state in numbers."""
        scheduler, stats, blocks = self._scheduler, self._scheduler.stats, self._scheduler.blocks
        host, now = blocks.host, self._clock()
        return ReplicaStatus(
            query_id=query_id,
            replica_id=self._replica_id,
            model=self._config.model.name,
            problem=problem,
            ranks=self._group.statuses(),
            block_size=blocks.block_size,
            num_blocks=blocks.num_blocks,
            num_used_blocks=blocks.num_held_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            peak_used_blocks=stats.peak_held_blocks,
            num_used_tokens=scheduler.num_used_tokens,
            mean_kv_fragmentation=stats.mean_kv_fragmentation,
            prefix_query_tokens=blocks.num_query_tokens,
            prefix_hit_tokens=blocks.num_hit_tokens,
            num_host_blocks=host.num_blocks if host else 0,
            num_used_host_blocks=host.num_held if host else 0,
            num_cached_host_blocks=host.num_cached if host else 0,
            num_swapped_blocks=blocks.num_swapped_blocks,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_finished=stats.num_finished,
            num_preemptions=stats.num_preemptions,
            num_steps=stats.num_steps,
            mean_plan_wait_s=stats.mean_plan_wait_s,
            uptime_s=now - self._started_at,
            draining=scheduler.is_draining,
            queued_tokens=scheduler.num_queued_tokens,
            kv_use=blocks.num_held_blocks / blocks.num_blocks,
            oldest_wait_s=scheduler.oldest_wait_s(now),
            tokens_per_s=scheduler.tokens_per_s,
            cache_version=blocks.journal.version,
        )
