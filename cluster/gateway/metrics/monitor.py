"""Monitor: what an operator sees of one gateway, composed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...os_utils.background import run_in_background
from ...text.requests.observer import Observers, RequestObserver
from .exposition import Exposition
from .recent_traffic import INTERVAL_S, SAMPLE_S, RecentTraffic, TrafficLog
from .request_metrics import RequestMetrics
from .views import FleetView, ModelsView


class Monitor:
    """Metrics of a gateway and their recent past. For one event loop.

    Args:
        fleet: None if the gateway has one replica of its own.
        observers: that receive every call beside the metrics.
        clock: monotonic time in seconds.

    Attributes:
        observer: to be given every call.
        recent: empty until `start`.
    """

    def __init__(
        self,
        models: ModelsView,
        fleet: FleetView | None = None,
        *observers: RequestObserver,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._models = models
        self.requests = RequestMetrics(clock)
        self.observer = Observers(self.requests, *observers)
        self.exposition = Exposition(models, self.requests, fleet)
        self.recent = RecentTraffic(self.requests, clock)
        self._log = TrafficLog(models, self.recent)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sample the traffic, and write it to the log while there is some. Safe to call twice."""
        if self._task is None:
            self._task = run_in_background(self._sample(), "sampling the traffic")

    async def close(self) -> None:
        """Stop sampling. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def sample(self) -> None:
        """Add the present totals to the recent traffic."""
        for model in self._models:
            self.requests.add_model(model.name)
        self.recent.sample()

    async def _sample(self) -> None:
        num_samples = 0
        while True:
            self.sample()
            num_samples += 1
            if num_samples * SAMPLE_S % INTERVAL_S == 0:
                self._log.write()
            await asyncio.sleep(SAMPLE_S)
