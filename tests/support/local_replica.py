"""LocalReplica: a replica without Ray, with the real step loop on a thread and a tiny model in this process."""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from quire.cluster.offline.in_process import InProcessGroup, load_in_process
from quire.proto.config import EngineConfig
from quire.proto.step import StepPlan, StepResult
from quire.scheduler.core.scheduler import Scheduler
from quire.scheduler.service.loop import StepLoop
from quire.scheduler.service.zmq_mailbox import ZmqMailbox

DEADLINE_S = 60.0
# A request of 400 tokens takes 40 s then: longer than a busy machine keeps a test from running.
SLOW_STEP_S = 0.1


class Brake:
    """Holds the ranks before their next step, or slows their steps down.

    Attributes:
        steps: plans that passed the brake.
    """

    def __init__(self) -> None:
        self._may_go = threading.Event()
        self._may_go.set()
        self._stands = threading.Event()
        self._is_fast = threading.Event()
        self._is_fast.set()
        self._num_let = 0  # steps that may pass before the ranks are held; 0 if no number was given
        self.steps: list[StepPlan] = []

    def hold(self) -> None:
        self._may_go.clear()

    def catch(self) -> None:
        """Hold the ranks, and return once a step has reached the brake. A request must be running."""
        self._stands.clear()
        self.hold()
        assert self._stands.wait(DEADLINE_S), f"no step reached the brake in {DEADLINE_S:g} s"

    def release(self) -> None:
        self._num_let = 0
        self._may_go.set()

    def let(self, num_steps: int) -> None:
        """Let so many steps pass, and hold the ranks before the next one.

        The result of the last one is not gathered before that, if two steps are in flight.
        """
        self._num_let = num_steps
        self._may_go.set()

    def slow_down(self) -> None:
        """Let each further step take SLOW_STEP_S, so that a long request still runs when the test interferes."""
        self._is_fast.clear()

    def speed_up(self) -> None:
        self._is_fast.set()

    def install(self, group: InProcessGroup) -> None:
        broadcast = group.broadcast

        def held_broadcast(plan: StepPlan) -> None:
            if not self._may_go.is_set():
                self._stands.set()
            assert self._may_go.wait(DEADLINE_S), "the test did not release the brake"
            if self._num_let:
                self._num_let -= 1
                if not self._num_let:
                    self.hold()
            self._is_fast.wait(SLOW_STEP_S)
            self.steps.append(plan)
            broadcast(plan)

        group.broadcast = held_broadcast  # type: ignore[method-assign]


class Script:
    """Replaces the tokens that the ranks sample, for outputs of a known text. For one running sequence.

    A step samples from the output that was the latest when the step was planned: the last step of an aborted request
    may still be in flight when the next output is written. Canaries, which gateways send to an idle replica while a
    client starts, sample tokens of their own.
    """

    def __init__(self) -> None:
        self._token_ids: deque[int] = deque()
        self._planned: dict[int, deque[int]] = {}  # step_id |-> its output, of the steps in flight

    def write(self, token_ids: Iterable[int]) -> None:
        """Let the next tokens be these, with the end of sequence after them. Replaces what was not sampled yet."""
        self._token_ids = deque([*token_ids, 0])

    def clear(self) -> None:
        """Forget what was not sampled yet, such as the tokens after a stop string."""
        self._token_ids = deque()

    def install(self, group: InProcessGroup) -> None:
        broadcast, gather = group.broadcast, group.gather

        def scripted_broadcast(plan: StepPlan) -> None:
            is_canary = any(new.num_tokens == 1 for new in plan.new)
            self._planned[plan.step_id] = deque() if is_canary else self._token_ids
            broadcast(plan)

        def scripted_gather(timeout_s: float) -> StepResult:
            result = gather(timeout_s)
            token_ids = self._planned.pop(result.step_id)
            if token_ids and len(result.token_ids) == 1:
                written = np.array([token_ids.popleft()], dtype=result.token_ids.dtype)
                return replace(result, token_ids=written)
            return result

        group.broadcast = scripted_broadcast  # type: ignore[method-assign]
        group.gather = scripted_gather  # type: ignore[method-assign]


@dataclass
class LocalReplica:
    """A replica whose step loop runs on a thread of the test."""

    config: EngineConfig
    address: str
    scheduler: Scheduler
    brake: Brake
    script: Script
    stop: Callable[[], None]


@contextmanager
def local_replica(config: EngineConfig, replica_id: str = "replica-0") -> Iterator[LocalReplica]:
    config, group = load_in_process(config)
    brake = Brake()
    brake.install(group)
    script = Script()
    script.install(group)
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        mailbox = ZmqMailbox(f"ipc://{folder}/replica")
        scheduler = Scheduler(config)
        loop = StepLoop(scheduler, group, mailbox, replica_id)
        thread = threading.Thread(target=loop.run)
        thread.start()

        def stop() -> None:
            brake.release()
            brake.speed_up()
            loop.stop()
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), f"the step loop did not end in {DEADLINE_S:g} s"

        try:
            yield LocalReplica(config, mailbox.endpoint, scheduler, brake, script, stop)
        finally:
            stop()
            mailbox.close()
            group.close()
