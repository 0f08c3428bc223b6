"""GatewayServices: the parts of a gateway that its gRPC server and its HTTP server share."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

from ....proto import admin_pb2
from ....proto.faults import Fault
from ....proto.replica_status import ReplicaStatus
from ...fleet.controller.fleet_state import FleetCommand
from ...os_utils.event_loop import run_in_background
from ...text.requests.observer import Observers, RequestObserver
from ..access.authentication import Authenticator
from ..access.security import Security
from ..generation.generation import GenerationService
from ..generation.retention import RetentionLimits
from ..metrics.exposition import Exposition
from ..metrics.recent_traffic import INTERVAL_S, SAMPLE_S, RecentTraffic, TrafficLog
from ..metrics.request_metrics import RequestMetrics
from ..metrics.views import FleetView, ModelsView
from ..routing.served_models import ServedModels


class Monitor:
    """Metrics of a gateway and their recent past. For one event loop.

    Args:
        fleet: None if the gateway has one replica of its own.
        observers: receive every call beside the metrics.
        clock: monotonic time in seconds.

    Attributes:
        observer: receives every call.
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


@dataclass(frozen=True, slots=True)
class GatewayServices:
    """Parts of a gateway that do not depend on the protocol. For one event loop.

    Attributes:
        models: the served models; their owner closes them after the servers.
        generation: runs the requests of all servers.
        monitor: observes every request; its owner starts it and closes it.
        fleet: changed by operators; None if nothing can be changed.
        faults: causes faults that operators ask for; None if they are refused.
        allows_lora_updates: HTTP callers may load and unload adapters.
        allows_engine_control: HTTP callers may pause engines, put them to sleep and change their weights.
        closing: set when a server begins to stop, for streams that would not end by themselves.
    """

    models: ServedModels
    generation: GenerationService
    authenticator: Authenticator
    security: Security
    monitor: Monitor
    fleet: Fleet | None = None
    faults: FaultInjector | None = None
    allows_lora_updates: bool = False
    allows_engine_control: bool = False
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def on_refused(self) -> Callable[[BaseException], None]:
        """Counts a call that a server refuses by itself, before `generation` knows of it."""
        return self.monitor.requests.count_refusal

    @staticmethod
    def compose(
        models: ServedModels,
        *,
        security: Security | None = None,
        fleet: Fleet | None = None,
        observers: Sequence[RequestObserver] = (),
        retention: RetentionLimits | None = None,
        faults: FaultInjector | None = None,
        allows_lora_updates: bool = False,
        allows_engine_control: bool = False,
    ) -> GatewayServices:
        """Return the services over these models.

        Args:
            security: without it, calls need no token and no TLS.
            observers: receive every call, beside the monitor.
        """
        security = security or Security()
        monitor = Monitor(models, fleet, *observers)
        generation = GenerationService(models, monitor.observer, security.tenants, retention)
        return GatewayServices(
            models,
            generation,
            Authenticator(security.tokens),
            security,
            monitor,
            fleet,
            faults,
            allows_lora_updates,
            allows_engine_control,
        )


@functools.cache
def server_version() -> str:
    """Return the version of the installed package; ``0`` in a source tree that is not installed."""
    try:
        return metadata.version("quire")
    except metadata.PackageNotFoundError:
        return "0"


class Fleet(Protocol):
    """The fleet behind a gateway."""

    def describe(self) -> admin_pb2.GetStatusResponse:
        """Return the fleet's state, without the load figures that only replicas have."""
        ...

    async def statuses(self) -> list[ReplicaStatus]:
        """Return the latest statuses of all replicas. Raises ReplicaUnavailable if the controller does not answer."""
        ...

    async def apply(self, command: FleetCommand) -> Mapping[str, Any]:
        """Have an operator's command carried out; return the fields of its response.

        Raises:
            QuireError: the fleet refused the command; ReplicaUnavailable if its controller does not answer.
        """
        ...


class FaultInjector(Protocol):
    """Causes faults in the processes of replicas."""

    async def inject(self, replica_id: str, rank: int | None, fault: Fault) -> int:
        """Cause a fault in a rank, or in the scheduler if `rank` is None; return its process id.

        Raises:
            InvalidRequest: the replica has no such rank.
            ReplicaUnavailable: the process does not run or does not answer.
        """
        ...
