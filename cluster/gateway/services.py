"""GatewayServices: the parts of a gateway that its gRPC server and its HTTP server share."""

from __future__ import annotations

from dataclasses import dataclass

from .admin import Fleet
from .authentication import Authenticator
from .generation import GenerationService
from ..requests.observer import RequestObserver
from .security import Security
from .served_models import ServedModels


@dataclass(frozen=True, slots=True)
class GatewayServices:
    """Parts of a gateway that do not depend on the protocol. For one event loop.

    Attributes:
        models: the served models; their owner closes them after the servers.
        generation: runs the requests of all servers.
        fleet: changed by operators; None if nothing can be changed.
    """

    models: ServedModels
    generation: GenerationService
    authenticator: Authenticator
    security: Security
    fleet: Fleet | None = None

    @staticmethod
    def compose(
        models: ServedModels,
        *,
        security: Security | None = None,
        fleet: Fleet | None = None,
        observer: RequestObserver | None = None,
    ) -> GatewayServices:
        """Return the services over these models; without `security`, calls need no token and no TLS."""
        security = security or Security()
        generation = GenerationService(models, observer, security.tenants)
        return GatewayServices(models, generation, Authenticator(security.tokens), security, fleet)
