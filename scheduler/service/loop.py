"""StepLoop: drives one scheduler and its ranks, for gateways behind a mailbox."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from ...proto.errors import QuireError, RankFailed, ReplicaUnavailable
from ...proto.replica_status import Activity, ReplicaRole, ReplicaStatus
from ...proto.step import StepResult
from ...proto.stream import (
    Abort,
    BlockMapQuery,
    CacheQuery,
    ControlEngine,
    Drain,
    EngineControlled,
    Finish,
    FlushCache,
    GatewayMessage,
    LoadLora,
    LoraLoaded,
    MediaUpload,
    Recall,
    StatusQuery,
    Stop,
    Submit,
    TokenBatch,
)
from ..core.replies.outbox import Outgoing, error_finish
from ..core.scheduler import Scheduler
from .collector import IdleCollector
from .event_sink import EventSink, NoSink
from .mailbox import Mailbox
from .recovery import GroupRecovery
from .worker_group import WorkerGroup

# Interval at which an idle loop checks that every rank is alive.
IDLE_CHECK_S = 1.0
# Interval at which messages are handled while a step or a recovery takes long: bounds the delay of a status.
BUSY_CHECK_S = 0.1
# Expected duration from which a step is a long prefill, for operators.
LONG_STEP_S = 1.0
# Shortest time between two statuses that a gateway gets unasked, and the gateways that get one at a time.
REPORT_INTERVAL_S = 1.0
MAX_REPORTS = 20
# A step after idle time is reported if others follow for this long: a canary is reported once, at its end.
SETTLING_S = 0.1
# Bounds the list: most such gateways never return.
MAX_DROPPED_GATEWAYS = 64

# Of a status: what changes with the time alone, and for each gateway.
_PASSING = frozenset({"query_id", "uptime_s", "activity_s", "last_step_s", "num_report_rounds"})
# What the step of a canary changes, too.
_STEP_COUNTERS = frozenset(
    {
        "busy_s", "mean_kv_fragmentation", "mean_plan_wait_s", "num_computed_tokens", "num_finished",
        "num_plan_waits", "num_steps", "peak_used_blocks", "plan_wait_s", "prefix_query_tokens", "ranks",
        "tokens_per_s",
    }
)  # fmt: skip
_counters_of = attrgetter(*sorted(_STEP_COUNTERS))
_load_of = attrgetter(*(each for each in ReplicaStatus.SENT_ORDER if each not in _PASSING | _STEP_COUNTERS))
# More computed tokens than those of all canaries between two queries of a watcher of the load.
_CANARY_TOKENS = 64
# class |-> its attributes that a ReplicaStatus has too.
_same_names_of: dict[type, list[str]] = {}

_log = logging.getLogger(__name__)


class _Stopped(Exception):
    """`stop` was called while a step or a recovery took long."""


class _State(NamedTuple):
    """The lasting part of a status: the load and condition, and the counters of steps."""

    load: tuple[object, ...] = ()
    counters: tuple[object, ...] = ()
    num_computed_tokens: int = 0

    @classmethod
    def of(cls, status: ReplicaStatus) -> _State:
        return cls(_load_of(status), _counters_of(status), status.num_computed_tokens)


@dataclass(slots=True)
class _Watcher:
    """A gateway, or the controller, that gets statuses unasked.

    Attributes:
        until: time at which this ends, unless it asks again.
        load_only: see StatusQuery.
        told: the latest state that it was told.
    """

    until: float
    load_only: bool
    told: _State

    def is_behind(self, state: _State) -> bool:
        """Return whether to tell it the replica's state, which is the same object as long as nothing changes."""
        if self.told is state:
            return False
        num_tokens = state.num_computed_tokens - self.told.num_computed_tokens
        return not self.load_only or self.told.load != state.load or num_tokens > _CANARY_TOKENS


class StepLoop:
    """The loop that drives one scheduler and its ranks.

    Args:
        clock: monotonic time, seconds; the only time that the scheduler sees.
        events: receives the changes of the prefix caches.
        collector: of a process that runs nothing else; None to leave the garbage collection to Python.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        group: WorkerGroup,
        mailbox: Mailbox,
        replica_id: str,
        clock: Callable[[], float] = time.monotonic,
        events: EventSink | None = None,
        collector: IdleCollector | None = None,
    ) -> None:
        self._events, self._collector = events or NoSink(), collector
        self._config = scheduler.config
        self._scheduler = scheduler
        self._group = group
        self._mailbox = mailbox
        self._replica_id = replica_id
        self._clock = clock
        self._started_at = clock()
        self._stopping = threading.Event()
        # gateway |-> handles that were ended while it did not read.
        self._dropped: dict[bytes, list[int]] = {}
        # gateway |-> how it is told of changes, those first that were told longest ago.
        self._watchers: dict[bytes, _Watcher] = {}
        self._reported = _State()  # the latest that some of them were told
        self._report_due_at = self._started_at
        # Whether no step is in flight for want of requests, and the first step after the latest such time.
        self._is_idle = True
        self._step_after_idle = 0
        self._recovery = GroupRecovery(group, clock, self._wait, mailbox.wake)
        self._epoch = scheduler.epoch
        self._failure: RankFailed | None = None  # of the ranks that are being rebuilt
        self._activity, self._active_since = Activity.IDLE, self._started_at

    def run(self) -> None:
        """Serve until `stop`, then end all requests with ReplicaUnavailable.

        Raises:
            RankFailed: a rank failed, and the ranks could not be rebuilt. All requests were ended with this error.
        """
        try:
            while not self._stopping.is_set():
                self.turn()
        except _Stopped:
            pass
        except QuireError as error:
            self._fail_all(error)
            raise
        except Exception as error:
            self._fail_all(
                ReplicaUnavailable(f"the scheduler of replica {self._replica_id} failed: {error!r}")
            )
            raise
        self._fail_all(ReplicaUnavailable(f"replica {self._replica_id} is shutting down"))

    def stop(self) -> None:
        """End `run` after the present step; from any thread."""
        self._stopping.set()
        self._mailbox.wake()

    def turn(self) -> None:
        """Run one step, or rebuild the ranks after a failure, and handle the messages that have arrived."""
        try:
            busy = self.step()
        except RankFailed as failure:
            self._recover(failure)
            busy = True
        self._events.publish(self._scheduler.blocks.events.take(), time.time())
        if self._collector is not None:
            self._collector.turn(self._clock(), is_idle=not busy)
        self.handle_messages(0.0 if busy else IDLE_CHECK_S)

    def step(self) -> bool:
        """Plan and broadcast up to max_steps_in_flight, then apply one result. Returns False if nothing ran."""
        scheduler, limits = self._scheduler, self._config.scheduler
        while scheduler.num_in_flight < limits.max_steps_in_flight:
            plan = scheduler.schedule(self._clock())
            if plan is None:
                break
            if self._is_idle:
                self._step_after_idle, self._is_idle = plan.step_id, False
            for image in scheduler.media.take_inputs():
                self._group.send_media(image)
            self._group.broadcast(plan)
        self._send_all(scheduler.take_outgoing())
        self._send_control_replies()
        self._ask_for_images()
        if not scheduler.num_in_flight:
            self._is_idle = True
            self._set_activity(Activity.IDLE)
            self._group.check()
            return False
        result = self._await_result()
        if result.step_id != self._step_after_idle:
            scheduler.stats.count_gap(result.stage_times.get("wait", 0.0))
        scheduler.stats.num_compilations = result.num_compilations
        self._send_all(scheduler.apply(result, self._clock()))
        self._send_lora_replies()
        self._send_control_replies()
        if limits.audit:
            scheduler.check_integrity()
        return True

    def _await_result(self) -> StepResult:
        """Return the result of the oldest step in flight, and handle messages if it takes long.

        Raises:
            RankFailed: a rank died, does not answer, or is overdue.
        """
        result = self._group.gather(BUSY_CHECK_S)
        while result is None:
            self._examine_late_ranks()
            self.handle_messages(0.0)
            if self._stopping.is_set():
                raise _Stopped
            result = self._group.gather(BUSY_CHECK_S)
        self._set_activity(Activity.BUSY)
        return result

    def _examine_late_ranks(self) -> None:
        step = self._scheduler.present_step
        assert step is not None, "a result is awaited, and no step is in flight"
        waited_s, deadlines = self._clock() - step.began_at, step.deadlines
        if waited_s >= deadlines.late_s:
            self._set_activity(Activity.LATE)
            self._group.examine(waited_s, failed_s=deadlines.failed_s)
        elif (deadlines.expected_s or 0.0) >= LONG_STEP_S:
            self._set_activity(Activity.PREFILL)

    def _recover(self, failure: RankFailed) -> None:
        """Rebuild the ranks. All sequences wait meanwhile, and continue from their tokens afterwards.

        Raises:
            RankFailed: the ranks cannot be rebuilt.
        """
        self._failure = failure
        _log.warning("%s: %s", self._replica_id, self._problem)
        self._set_activity(Activity.RECOVERING)
        try:
            self._scheduler.interrupt(failure, self._clock())
        except Exception as error:
            raise failure from error  # the state may be inconsistent
        self._epoch += 1
        self._broadcast_status()
        self._await_end_of_sleep()
        started_at = self._clock()
        rebuilt = self._recovery.recover(failure, self._epoch)
        self._scheduler.resume(self._epoch, rebuilt.kept, has_new_ranks=rebuilt.has_new_ranks)
        self._failure, self._is_idle = None, True
        self._set_activity(Activity.BUSY)
        self._broadcast_status()
        _log.info("%s has rebuilt its ranks in %.2f s", self._replica_id, self._clock() - started_at)

    def _await_end_of_sleep(self) -> None:
        """Wait as long as an operator leaves the replica asleep: others may use the memory that new ranks need."""
        never = threading.Event()
        while self._scheduler.control.stays_asleep:
            self._wait(never, IDLE_CHECK_S)

    def _wait(self, event: threading.Event, timeout_s: float) -> None:
        """Handle messages during a recovery until the event is set, or at most for a moment. Raises _Stopped."""
        self._scheduler.wait(self._clock())
        self._send_all(self._scheduler.take_outgoing())
        if self._stopping.is_set():
            raise _Stopped
        if not event.is_set():
            self.handle_messages(min(timeout_s, BUSY_CHECK_S))

    def _set_activity(self, activity: Activity) -> None:
        if activity is not self._activity:
            self._activity, self._active_since = activity, self._clock()

    def _broadcast_status(self) -> None:
        """Send the status to every gateway with requests, and to those that watch, before they ask."""
        status = self.status()
        for gateway in dict.fromkeys((*self._scheduler.gateways, *self._watchers)):
            self._mailbox.send(gateway, status)

    def _report_changes(self) -> None:
        """Send the status to gateways that watch, if it has changed since they got one: to MAX_REPORTS in turn."""
        now = self._clock()
        has_begun = self._activity is Activity.BUSY and now - self._active_since < SETTLING_S
        if not self._watchers or now < self._report_due_at or has_begun:
            return
        status = self.status()
        self._note_state(status)
        behind = [name for name, watcher in self._watchers.items() if watcher.is_behind(self._reported)]
        for gateway in behind[:MAX_REPORTS]:
            watcher = self._watchers.pop(gateway)
            if now < watcher.until and self._mailbox.send(gateway, status):
                self._watch(gateway, watcher.until, watcher.load_only)
        if behind:
            self._report_due_at = now + REPORT_INTERVAL_S

    def _note_state(self, status: ReplicaStatus) -> None:
        """Take note of what is told."""
        state = _State.of(status)
        if state != self._reported:
            self._reported = state

    def _watch(self, gateway: bytes, until: float, load_only: bool) -> None:
        """Tell a gateway that knows the noted state of changes from now on, after all others."""
        self._watchers.pop(gateway, None)
        self._watchers[gateway] = _Watcher(until, load_only, self._reported)

    @property
    def _problem(self) -> str:
        if self._failure is None:
            return ""
        stays_asleep = self._scheduler.control.stays_asleep
        what = "are rebuilt when the next command comes" if stays_asleep else "are being rebuilt"
        return f"the ranks {what}: {self._failure}"

    def handle_messages(self, timeout_s: float) -> None:
        """Handle the messages that have arrived; wait up to `timeout_s` for the first."""
        self._report_changes()
        for gateway, message in self._mailbox.receive(timeout_s):
            self._handle(gateway, message)

    def _handle(self, gateway: bytes, message: GatewayMessage) -> None:
        if gateway in self._dropped:
            self._report_dropped(gateway)
        match message:
            case Submit():
                self._send_finish(gateway, self._scheduler.add(gateway, message, self._clock()))
                self._ask_for_images()
            case MediaUpload():
                self._scheduler.receive_media(message, self._clock())
            case Abort():
                self._scheduler.abort(gateway, message.handle, self._clock())
            case Stop():
                self._send_finish(gateway, self._scheduler.stop(gateway, message.handle, self._clock()))
            case StatusQuery():
                status = self.status(message.query_id)
                if message.watch_s > 0:
                    self._note_state(status)
                    self._watch(gateway, self._clock() + message.watch_s, message.load_only)
                self._mailbox.send(gateway, status)
            case CacheQuery():
                self._mailbox.send(gateway, self._scheduler.blocks.journal.report(message.since))
            case BlockMapQuery():
                self._mailbox.send(gateway, self._scheduler.block_map(message.query_id))
            case Recall():
                self._mailbox.send(gateway, self._scheduler.recall(message, self._clock()))
            case FlushCache():
                _log.info("%s empties its prefix cache", self._replica_id)
                self._scheduler.blocks.flush_cache()
            case LoadLora():
                self._order_adapter(gateway, message)
            case ControlEngine():
                _log.info("%s: %s", self._replica_id, message.command.action)
                caller = (gateway, message.query_id) if message.query_id else None
                self._scheduler.control.order(message.command, caller)
            case Drain():
                _log.info("%s is draining: running sequences have %g s", self._replica_id, message.grace_s)
                self._scheduler.drain(message.grace_s, self._clock())

    def _ask_for_images(self) -> None:
        """Ask gateways for images. One that does not read lets its requests end by the deadline of uploads."""
        for gateway, wanted in self._scheduler.media.take_asks():
            self._mailbox.send(gateway, wanted)

    def _order_adapter(self, gateway: bytes, message: LoadLora) -> None:
        lora = self._scheduler.lora
        if lora is None:
            problem = f"{self._replica_id} runs without enable_lora"
            self._mailbox.send(gateway, LoraLoaded(message.query_id, problem))
            return
        lora.register(message.reference, (gateway, message.query_id) if message.query_id else None)
        self._send_lora_replies()

    def _send_control_replies(self) -> None:
        for problem in self._scheduler.control.take_problems():
            _log.error("%s: %s", self._replica_id, problem)
        for (gateway, query_id), error in self._scheduler.control.take_replies():
            self._mailbox.send(gateway, EngineControlled(query_id, error))

    def _send_lora_replies(self) -> None:
        """Tell gateways the outcome of loads. One that does not read learns of it by its own deadline."""
        lora = self._scheduler.lora
        if lora is None:
            return
        for problem in lora.take_problems():
            _log.error("%s: %s", self._replica_id, problem)
        for gateway, reply in lora.take_replies():
            self._mailbox.send(gateway, reply)

    def _send_finish(self, gateway: bytes, finish: Finish | None) -> None:
        if finish is not None:
            self._send_all([(gateway, TokenBatch(0, finished=(finish,)))])

    def _send_all(self, outgoing: Outgoing) -> None:
        for gateway, batch in outgoing:
            if not self._mailbox.send(gateway, batch):
                _log.warning("gateway %s is gone or does not read: its requests are ended", gateway.hex())
                self._drop_gateway(gateway, batch)

    def _drop_gateway(self, gateway: bytes, unsent: TokenBatch) -> None:
        """End the requests of a gateway that does not read; `_report_dropped` reports them if it comes back."""
        ended = self._scheduler.drop_gateway(gateway, self._clock())
        handles = [finish.handle for finish in unsent.finished] + ended
        self._dropped[gateway] = self._dropped.pop(gateway, []) + handles
        if len(self._dropped) > MAX_DROPPED_GATEWAYS:
            del self._dropped[next(iter(self._dropped))]

    def _report_dropped(self, gateway: bytes) -> None:
        """Report ended requests to a gateway that came back: it still waits for their ends."""
        error = ReplicaUnavailable(
            f"{self._replica_id} ended the request: its gateway did not read the output"
        )
        ends = tuple(error_finish(handle, error) for handle in self._dropped[gateway])
        if self._mailbox.send(gateway, TokenBatch(0, finished=ends)):
            del self._dropped[gateway]

    def _fail_all(self, error: QuireError) -> None:
        """End every request with an error and report it to the gateways.

        After an error inside the scheduler its state may be inconsistent, so each part continues past exceptions.
        """
        with self._logging_exceptions():
            self.handle_messages(0.0)  # requests that arrived during the last step are reported as well
        with self._logging_exceptions():
            self._send_unchecked(self._scheduler.fail_all(error))
        with self._logging_exceptions():
            self._send_unchecked(self._scheduler.take_outgoing())

    def _send_unchecked(self, outgoing: Outgoing) -> None:
        for gateway, batch in outgoing:
            self._mailbox.send(gateway, batch)

    @contextmanager
    def _logging_exceptions(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            _log.exception("%s could not end in order", self._replica_id)

    def status(self, query_id: int = 0) -> ReplicaStatus:
        """Return the replica's state in numbers."""
        scheduler, now = self._scheduler, self._clock()
        stats, blocks, control = scheduler.stats, scheduler.blocks, scheduler.control
        host, update, stored, encoded = blocks.host, control.update, blocks.stored, scheduler.media.cache
        return ReplicaStatus(
            self._replica_id,
            self._config.model.name,
            query_id=query_id,
            problem=self._problem,
            ranks=self._group.statuses(),
            uptime_s=now - self._started_at,
            draining=scheduler.is_draining,
            kv_use=blocks.num_held_blocks / blocks.num_blocks,
            cache_version=blocks.journal.version,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            num_accepted_tokens=tuple(stats.num_accepted),
            activity=self._activity,
            activity_s=now - self._active_since,
            num_recoveries=self._recovery.num_recoveries,
            generates=self._config.model.generates,
            loras=() if scheduler.lora is None else scheduler.lora.registry,
            weights_path="" if update is None else update.path,
            weights_timestamp="" if update is None else update.timestamp,
            num_used_blocks=blocks.num_held_blocks,
            num_used_tokens=scheduler.num_used_tokens,
            prefix_query_tokens=blocks.num_query_tokens,
            prefix_hit_tokens=blocks.num_hit_tokens,
            num_host_blocks=host.num_blocks if host else 0,
            num_used_host_blocks=host.num_held if host else 0,
            num_cached_host_blocks=host.num_cached if host else 0,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            queued_tokens=scheduler.num_queued_tokens,
            oldest_wait_s=scheduler.oldest_wait_s(now),
            fullest_kv_use=blocks.pool.max_partition_use,
            last_step_s=now - scheduler.throughput.last_step_at,
            reports_changes=True,
            num_report_rounds=max(1, math.ceil(len(self._watchers) / MAX_REPORTS)),
            num_state_slots=blocks.state_slots.num_slots,
            num_used_state_slots=blocks.state_slots.num_held,
            num_snapshots=blocks.state_slots.num_snapshots,
            num_saved_snapshots=blocks.state_slots.num_saved,
            encoder_cache_bytes=0 if self._config.model.vision is None else encoded.capacity,
            encoder_output_bytes=encoded.num_bytes,
            num_encoder_outputs=len(encoded),
            num_encoded_images=encoded.num_encoded,
            image_tensor_bytes=scheduler.media.num_held_bytes,
            num_host_state_slots=blocks.state_slots.num_host_slots,
            num_host_snapshots=blocks.state_slots.num_host_snapshots,
            num_disk_blocks=stored.num_blocks_in[0],
            num_shared_blocks=stored.num_blocks_in[1],
            disk_bytes=stored.tier_bytes[0],
            shared_bytes=stored.tier_bytes[1],
            stored_hit_tokens=stored.num_hit_tokens,
            role=ReplicaRole(self._config.cache.role),
            prefill_tokens_per_s=scheduler.prefill_tokens_per_s,
            prefill_delay=scheduler.prefill_delay,
            **_same_names(stats, scheduler.throughput, blocks, control, scheduler.kv_moves, stored),
        )


def _same_names(*sources: object) -> dict[str, Any]:
    """Return the values of the sources' attributes that a ReplicaStatus has too."""
    values: dict[str, Any] = {}
    for source in sources:
        kind = type(source)
        if kind not in _same_names_of:
            _same_names_of[kind] = [name for name in ReplicaStatus.SENT_ORDER if hasattr(source, name)]
        for name in _same_names_of[kind]:
            values[name] = getattr(source, name)
    return values
