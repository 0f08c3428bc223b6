"""SchedulerActor: a replica's scheduler in a process of its own, which the cluster makes a Ray actor.

The step loop has a thread of its own, so that it outlives the process that started it, and Ray carries no steps. The
actor's calls are short, except `wait_ended`, which has a concurrency group of its own: there, calls of owners that
died may wait before calls of their successors. All return when the step loop ends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import ray

from ...proto.config import EngineConfig
from ...proto.faults import SIGNALS, Fault
from ...proto.transport.network import CurveKeys
from ..core.scheduler import Scheduler
from .collector import IdleCollector
from .kv_events import open_sink
from .loop import StepLoop
from .step_record import recorded_ranks
from .worker_group import WorkerGroup
from .zmq_mailbox import ZmqMailbox

WATCH_GROUP = "watch"

_log = logging.getLogger(__name__)


class SchedulerActor:
    """The actor of one replica, which runs its step loop on a thread."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._raylet_pid = os.getppid()
        self._config: EngineConfig | None = None
        self._make_group: Callable[[], WorkerGroup] | None = None
        self._loop: StepLoop | None = None
        self._open = ExitStack()
        self._ended = threading.Event()
        self._error: Exception | None = None

    def where(self) -> tuple[str, int]:
        """Return the actor's node address and process id."""
        return str(ray.util.get_node_ip_address()), os.getpid()

    def start(
        self,
        config: EngineConfig,
        make_group: Callable[[], WorkerGroup],
        endpoint: str,
        keys: CurveKeys | None = None,
    ) -> str:
        """Join the ranks, open the mailbox for gateways and start serving.

        Args:
            make_group: makes the group of ranks in this process: its sockets cannot be sent between processes.
            endpoint, keys: see ZmqMailbox.

        Returns:
            The endpoint for gateways, with the port that was bound.

        Raises:
            ReplicaUnavailable: a rank did not join.
            ConfigError: an address of kv_events cannot be bound, or the file of record_steps not be made.
        """
        with ExitStack() as opened:
            ranks = make_group()
            opened.callback(ranks.close)
            group = opened.enter_context(recorded_ranks(ranks, config, self._replica_id))
            mailbox = ZmqMailbox(endpoint, keys)
            opened.callback(mailbox.close)
            events, collector = open_sink(config.cache, time.time()), IdleCollector()
            opened.callback(events.close)
            self._loop = StepLoop(
                Scheduler(config), group, mailbox, self._replica_id, events=events, collector=collector
            )
            self._open = opened.pop_all()
        self._config, self._make_group = config, make_group
        collector.start()
        threading.Thread(target=self._run, args=(self._loop,), name="step-loop", daemon=True).start()
        return mailbox.endpoint

    def config(self) -> EngineConfig | None:
        """Return the configuration that is served, or None before the start and after the end."""
        return None if self._ended.is_set() else self._config

    def group_maker(self) -> Callable[[], WorkerGroup] | None:
        """Return what `start` got to make the group: a new owner needs it to start another scheduler."""
        return self._make_group

    def wait_ended(self) -> None:
        """Return when the step loop has ended. Call it in the concurrency group WATCH_GROUP.

        Raises:
            RankFailed: a rank failed; all requests were ended with this error.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def cause(self, fault: Fault) -> None:
        """Cause a fault in this process, which it ends or stops: does not return."""
        _log.warning("%s: an operator causes the fault %s in its scheduler", self._replica_id, fault.kind)
        os.kill(os.getpid(), SIGNALS[fault.kind])

    def stop(self) -> None:
        """End the step loop after the present step."""
        if self._loop is not None:
            self._loop.stop()

    def _run(self, loop: StepLoop) -> None:
        try:
            with self._open:
                loop.run()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()
            # Ray passes no call's result to the owner any more when the raylet has died.
            if os.getppid() != self._raylet_pid:
                _log.error("%s ends its process, since its raylet died: %s", self._replica_id, self._error)
                os._exit(1)
