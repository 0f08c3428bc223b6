"""FleetCommand: a change of a fleet that an operator asks for. Plain data, which gateways forward to the controller.

Each command has the name of its call in quire.v1.Admin and the fields of the call's request. `Fleet.apply` carries
it out and returns the fields of the call's response. So a new call is declared in admin.proto, here and in
`Fleet.apply`, and the gateway serves it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...config.deployment import Deployment


@dataclass(frozen=True, slots=True)
class Deploy:
    """Add or change a deployment."""

    deployment: Deployment


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove the deployment of a model."""

    model: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain a replica or all replicas of a node, by id or unique prefix."""

    target: str


@dataclass(frozen=True, slots=True)
class Undrain:
    """Take back the drain of a replica, by id or unique prefix, that waits for another one to take over."""

    target: str


@dataclass(frozen=True, slots=True)
class SetScale:
    """Change the bounds of a deployment's replicas; None keeps one."""

    model: str
    min_replicas: int | None
    max_replicas: int | None


FleetCommand = Deploy | Delete | Drain | Undrain | SetScale
