"""Deployments from the MODEL argument, its options and the environment, or from a fleet file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ...proto.options.option import read_environment
from ..config.deployment import Deployment, ScalingLimits, read_fleet_file
from ..config.engine_options import EngineOptions

FLEET_FILE_SUFFIX = ".toml"


def read_deployments(model: str, given: Mapping[str, Any]) -> tuple[Deployment, ...]:
    """Return the deployments of a command. Options win over the environment, and so do entries of a fleet file.

    Args:
        model: a model directory, ``demo``, or a fleet file.
        given: options of the command line, by name.

    Raises:
        ConfigError: a file cannot be read, or an option has a bad value.
        BadParameter: options are given beside a fleet file.
    """
    environment = read_environment(os.environ, EngineOptions, ScalingLimits, Deployment)
    if not model.endswith(FLEET_FILE_SUFFIX):
        return (Deployment.from_table({**environment, **given, "model": model}),)
    if given:
        raise typer.BadParameter(f"{', '.join(given)}: options of models stand in the fleet file")
    return read_fleet_file(Path(model), environment)
