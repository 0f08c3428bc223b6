"""SchedulerActor: a replica's scheduler as a process of its own, made a Ray actor by the cluster.

It wants two concurrent calls: `run` occupies one for the replica's whole life, and the other answers `stop`
meanwhile. The step loop thus has a thread of its own, and Ray carries no step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ..proto.config import EngineConfig
from .loop import StepLoop
from .mailbox import ZmqMailbox
from .scheduler import Scheduler
from .worker_group import WorkerGroup


class SchedulerActor:
    """Owns a replica's blocks and drives its ranks."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._loop: StepLoop | None = None
        self._open = ExitStack()

    def start(self, config: EngineConfig, make_group: Callable[[], WorkerGroup], endpoint: str) -> None:
        """Joins the ranks and opens the mailbox for gateways.

        Args:
            make_group: builds the ranks' group in this process: its sockets cannot travel.
            endpoint: ZeroMQ endpoint for gateways.

        Raises:
            ReplicaUnavailable: a rank did not join.
        """
        group = make_group()
        self._open.callback(group.close)
        mailbox = ZmqMailbox(endpoint)
        self._open.callback(mailbox.close)
        self._loop = StepLoop(Scheduler(config), group, mailbox, self._replica_id)

    def run(self) -> None:
        """Runs the step loop until `stop`.

        Raises:
            RankFailed: a rank failed; the gateways have been told.
        """
        assert self._loop is not None
        with self._open:
            self._loop.run()

    def stop(self) -> None:
        """Ends `run` after the present step."""
        if self._loop is not None:
            self._loop.stop()
