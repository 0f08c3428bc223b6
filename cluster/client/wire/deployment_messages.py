"""Conversions between Deployment and its message in quire.v1."""

from __future__ import annotations

from ....proto import admin_pb2
from ....proto.errors import ConfigError
from ...config.deployment import Deployment
from .message_fields import from_message, to_message


def deployment_to_message(deployment: Deployment) -> admin_pb2.Deployment:
    """Raises ConfigError for a value that the message cannot hold."""
    try:
        return to_message(admin_pb2.Deployment, deployment)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the deployment of {deployment.name!r} cannot be sent: {error}") from error


def deployment_from_message(message: admin_pb2.Deployment) -> Deployment:
    """Raises ConfigError for a missing model or a value out of its range."""
    if not message.engine.model:
        raise ConfigError("deployment.engine.model is empty, must be a model directory or ORG/NAME")
    return from_message(Deployment, message)
