"""GatewayServices: the parts of a gateway that its gRPC server and its HTTP server share."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from ...text.requests.observer import RequestObserver
from ..access.authentication import Authenticator
from ..access.security import Security
from ..generation.generation import GenerationService
from ..generation.retention import RetentionLimits
from ..metrics.monitor import Monitor
from ..routing.fleet_interface import FaultInjector, Fleet
from ..routing.served_models import ServedModels


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
