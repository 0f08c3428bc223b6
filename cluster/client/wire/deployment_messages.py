"""Conversions between Deployment and its message in quire.v1. Fields of the same name correspond."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from google.protobuf.message import Message

from ....proto import admin_pb2
from ....proto.errors import ConfigError
from ...config.deployment import Deployment
from ...config.engine_options import EngineOptions
from ...config.scaling_limits import ScalingLimits


def deployment_to_message(deployment: Deployment) -> admin_pb2.Deployment:
    """Raises ConfigError for a value that the message cannot hold."""
    try:
        return admin_pb2.Deployment(**_message_fields(deployment))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the deployment of {deployment.name!r} cannot be sent: {error}") from error


def deployment_from_message(message: admin_pb2.Deployment) -> Deployment:
    """Raises ConfigError for a missing model or a value out of its range."""
    if not message.engine.model:
        raise ConfigError("deployment.engine.model is empty, must be a model directory or ORG/NAME")
    values = _present_fields(message)
    engine = EngineOptions(**_present_fields(message.engine))
    limits = ScalingLimits(**_present_fields(message.limits))
    return Deployment(**{**values, "engine": engine, "limits": limits})


def _message_fields(options: Any) -> dict[str, Any]:
    """Return field |-> value of the message of a dataclass; None is left unset."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: _message_value(value) for name, value in values.items() if value is not None}


def _message_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_named(name, entry) for name, entry in value]
    if isinstance(value, EngineOptions):
        return admin_pb2.EngineOptions(**_message_fields(value))
    if isinstance(value, ScalingLimits):
        return admin_pb2.ScalingLimits(**_message_fields(value))
    return value


def _named(name: str, value: str | float) -> Message:
    if isinstance(value, str):
        return admin_pb2.NamedText(name=name, text=value)
    return admin_pb2.NamedAmount(name=name, amount=value)


# Message of a named value |-> its field for the value.
_NAMED = {admin_pb2.NamedAmount.DESCRIPTOR: "amount", admin_pb2.NamedText.DESCRIPTOR: "text"}


def _present_fields(message: Message) -> dict[str, Any]:
    """Return field |-> value of the fields that are set in a message."""
    return {
        field.name: tuple((each.name, getattr(each, _NAMED[field.message_type])) for each in value)
        if field.message_type in _NAMED
        else value
        for field, value in message.ListFields()
    }
