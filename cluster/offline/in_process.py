"""One rank in this process: the scheduler and the worker of a cluster, without one. No Ray, no other process."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from functools import partial

from ...proto.config import EngineConfig
from ...proto.errors import from_status
from ...proto.step import StepPlan, StepResult
from ...proto.stream import RankStatus
from ...scheduler.core.scheduler import Scheduler
from ...worker.comm.communicator import SingleRank
from ...worker.runner import ModelRunner
from ..host.stopwatch import Stopwatch
from ..replica.loading_bar import LoadingBar
from ..requests.request import Request
from ..requests.sequence_update import SequenceUpdate, split

_log = logging.getLogger(__name__)

_GATEWAY = b"in-process"


class InProcessGroup:
    """A WorkerGroup of one rank that executes each plan as it is broadcast."""

    def __init__(self, runner: ModelRunner, device: str) -> None:
        self._runner = runner
        self._device = device
        self._results: deque[StepResult] = deque()

    def broadcast(self, plan: StepPlan) -> None:
        self._results.append(self._runner.execute(plan))
        self._runner.after_step()

    def gather(self, timeout_s: float) -> StepResult:
        """Never waits: broadcast has done the work."""
        return self._results.popleft()

    def check(self) -> None:
        """This process is alive."""

    def statuses(self) -> tuple[RankStatus, ...]:
        return (RankStatus(0, os.getpid(), socket.gethostname(), self._device, self._runner.stage),)

    def close(self) -> None:
        self._runner.close()


def load_in_process(config: EngineConfig) -> tuple[EngineConfig, InProcessGroup]:
    """Loads the model and allocates its KV cache; the configuration comes back with the number of blocks.

    Raises:
        ModelLoadError: the model directory cannot be read.
        ConfigError: the KV cache does not fit.
    """
    stopwatch = Stopwatch()
    with LoadingBar(1) as bar:
        runner = ModelRunner(config, SingleRank(), partial(bar.update, 0))
    stopwatch.lap("weights")
    config = config.with_num_blocks(runner.num_blocks_that_fit())
    stopwatch.lap("profile")
    assert config.cache.num_blocks is not None
    config = config.with_swap_rate(runner.allocate_cache(config.cache.num_blocks))
    stopwatch.lap("allocate")
    _log.info("%s loaded in this process: %s", config.model.name, stopwatch)
    return config, InProcessGroup(runner, config.parallel.device)


class InProcessEngine:
    """Runs requests to their end, all together.

    Attributes:
        config: with the number of KV blocks filled in.
        scheduler: to look at; the engine drives it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config, self._group = load_in_process(config)
        self.scheduler = Scheduler(self.config)

    def submit(self, handle: int, request: Request) -> None:
        """Queues a request; answer i is named `handle` + i. Raises the QuireError of a refusal."""
        refusal = self.scheduler.add(_GATEWAY, request.submit(handle), time.monotonic())
        if refusal is not None:
            raise from_status(refusal.grpc_status, refusal.error)

    def stop(self, handle: int) -> SequenceUpdate:
        """Ends an answer in which a stop string was found; its Finish."""
        return SequenceUpdate(finish=self.scheduler.stop(_GATEWAY, handle, time.monotonic()))

    def abort(self, handle: int) -> None:
        """Ends an answer and frees its blocks; unknown handles are ignored."""
        self.scheduler.abort(_GATEWAY, handle)

    def step(self) -> Iterator[tuple[int, SequenceUpdate]]:
        """One step of everything queued: handle |-> its news."""
        plan = self.scheduler.schedule(time.monotonic())
        assert plan is not None, "sequences wait, none runs and none can start"
        self._group.broadcast(plan)
        result = self._group.gather(self.config.scheduler.step_timeout_s)
        for _, batch in self.scheduler.apply(result, time.monotonic()):
            yield from split(batch)

    def close(self) -> None:
        self._group.close()
