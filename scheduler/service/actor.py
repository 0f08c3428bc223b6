"""SchedulerActor: a replica's scheduler as a process of its own, made a Ray actor by the cluster.

The step loop has a thread of its own, so that it outlives whoever started it, and Ray carries no step. The actor's
calls are short, except `wait_ended`: it has a concurrency group of its own, and in it the calls of owners that died
may wait before those of their successors. All end together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack

import ray

from ...proto.config import EngineConfig
from ...proto.transport.network import CurveKeys
from ..core.scheduler import Scheduler
from .loop import StepLoop
from .worker_group import WorkerGroup
from .zmq_mailbox import ZmqMailbox

WATCH_GROUP = "watch"


class SchedulerActor:
    """Owns a replica's blocks and drives its ranks."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._config: EngineConfig | None = None
        self._loop: StepLoop | None = None
        self._open = ExitStack()
        self._ended = threading.Event()
        self._error: Exception | None = None

    def where(self) -> tuple[str, int]:
        """Its node's address and its process id."""
        return str(ray.util.get_node_ip_address()), os.getpid()

    def start(
        self,
        config: EngineConfig,
        make_group: Callable[[], WorkerGroup],
        endpoint: str,
        keys: CurveKeys | None = None,
    ) -> str:
        """Joins the ranks, opens the mailbox for gateways and begins to serve.

        Args:
            make_group: builds the ranks' group in this process: its sockets cannot travel.
            endpoint, keys: the mailbox's; see ZmqMailbox.

        Returns:
            The endpoint for gateways, with its port.

        Raises:
            ReplicaUnavailable: a rank did not join.
        """
        with ExitStack() as opened:
            group = make_group()
            opened.callback(group.close)
            mailbox = ZmqMailbox(endpoint, keys)
            opened.callback(mailbox.close)
            self._loop = StepLoop(Scheduler(config), group, mailbox, self._replica_id)
            self._open = opened.pop_all()
        self._config = config
        threading.Thread(target=self._run, args=(self._loop,), name="step-loop", daemon=True).start()
        return mailbox.endpoint

    def config(self) -> EngineConfig | None:
        """What it serves; None while it does not."""
        return None if self._ended.is_set() else self._config

    def wait_ended(self) -> None:
        """Returns when the step loop has ended. To be called in the concurrency group WATCH_GROUP.

        Raises:
            RankFailed: a rank failed; the gateways have been told.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ends the step loop after the present step."""
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
