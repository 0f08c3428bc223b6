"""LocalReplica: a replica without Ray, with the real step loop on a thread and a tiny model in this process."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.cluster.offline.in_process import InProcessGroup, load_in_process
from quire.proto.config import EngineConfig
from quire.proto.step import StepPlan
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import StepLoop
from quire.scheduler.service.zmq_mailbox import ZmqMailbox

DEADLINE_S = 60.0


class Brake:
    """Holds the ranks before their next step.

    Attributes:
        steps: plans that passed the brake.
    """

    def __init__(self) -> None:
        self._may_go = threading.Event()
        self._may_go.set()
        self._stands = threading.Event()
        self.steps: list[StepPlan] = []

    def hold(self) -> None:
        self._may_go.clear()

    def catch(self) -> None:
        """Hold the ranks, and return once a step has reached the brake. A request must be running."""
        self._stands.clear()
        self.hold()
        assert self._stands.wait(DEADLINE_S), f"no step reached the brake in {DEADLINE_S:g} s"

    def release(self) -> None:
        self._may_go.set()

    def install(self, group: InProcessGroup) -> None:
        broadcast = group.broadcast

        def held_broadcast(plan: StepPlan) -> None:
            if not self._may_go.is_set():
                self._stands.set()
            assert self._may_go.wait(DEADLINE_S), "the test did not release the brake"
            self.steps.append(plan)
            broadcast(plan)

        group.broadcast = held_broadcast  # type: ignore[method-assign]


@dataclass
class LocalReplica:
    """A replica whose step loop runs on a thread of the test."""

    config: EngineConfig
    address: str
    scheduler: Scheduler
    brake: Brake
    stop: Callable[[], None]


@contextmanager
def local_replica(config: EngineConfig, replica_id: str = "replica-0") -> Iterator[LocalReplica]:
    config, group = load_in_process(config)
    brake = Brake()
    brake.install(group)
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        mailbox = ZmqMailbox(f"ipc://{folder}/replica")
        scheduler = Scheduler(config)
        loop = StepLoop(scheduler, group, mailbox, replica_id)
        thread = threading.Thread(target=loop.run)
        thread.start()

        def stop() -> None:
            brake.release()
            loop.stop()
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), f"the step loop did not end in {DEADLINE_S:g} s"

        try:
            yield LocalReplica(config, mailbox.endpoint, scheduler, brake, stop)
        finally:
            stop()
            mailbox.close()
            group.close()
