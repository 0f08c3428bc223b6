"""Conversions between Deployment and its message in quire.v1. Fields of the same name correspond."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from google.protobuf.message import Message

from ...proto import admin_pb2
from ...proto.errors import ConfigError
from ..config.deployment import Deployment
from ..config.engine_options import EngineOptions
from ..config.scaling_limits import ScalingLimits


def deployment_to_message(deployment: Deployment) -> admin_pb2.Deployment:
    """Raises ConfigError for a value that the message cannot hold."""
    try:
        weights = [
            admin_pb2.TenantWeight(tenant=tenant, weight=weight)
            for tenant, weight in deployment.engine.tenant_weights
        ]
        return admin_pb2.Deployment(
            engine=admin_pb2.EngineOptions(
                **_set_values(deployment.engine, without="tenant_weights"), tenant_weights=weights
            ),
            limits=admin_pb2.ScalingLimits(**_set_values(deployment.limits)),
            rank_resources=dict(deployment.rank_resources),
            drain_grace_s=deployment.drain_grace_s,
            revision=deployment.revision,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the deployment of {deployment.name!r} cannot be sent: {error}") from error


def deployment_from_message(message: admin_pb2.Deployment) -> Deployment:
    """Raises ConfigError for a missing model or a value out of its range."""
    if not message.engine.model:
        raise ConfigError("deployment.engine.model is empty, must be a model directory")
    engine = _present_values(EngineOptions, message.engine)
    if message.engine.tenant_weights:
        engine["tenant_weights"] = tuple((each.tenant, each.weight) for each in message.engine.tenant_weights)
    return Deployment(
        EngineOptions(**engine),
        ScalingLimits(**_present_values(ScalingLimits, message.limits)),
        rank_resources=tuple(sorted(message.rank_resources.items())),
        **{name: getattr(message, name) for name in ("drain_grace_s", "revision") if message.HasField(name)},
    )


def _set_values(options: Any, without: str = "") -> dict[str, Any]:
    """Return field |-> value of a dataclass, without those that are None."""
    values = {field.name: getattr(options, field.name) for field in fields(options) if field.name != without}
    return {name: value for name, value in values.items() if value is not None}


def _present_values(kind: type, message: Message) -> dict[str, Any]:
    """Return field |-> value for the dataclass's fields that are set in the message."""
    present = {descriptor.name: value for descriptor, value in message.ListFields()}
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in present.items() if name in names and name != "tenant_weights"}
