"""What MODEL and its options, or a fleet file, say is to be deployed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .engine_options import engine_options, fleet_options
from .groups import changed

if TYPE_CHECKING:
    from ..config.deployment import Deployment


def read_deployments(model: str, engine: dict[str, Any], fleet: dict[str, Any]) -> tuple[Deployment, ...]:
    """Raises ConfigError on a file that cannot be used, BadParameter on options beside it."""
    from ..config.deployment import Deployment, read_fleet_file

    if not model.endswith(".toml"):
        return (Deployment.from_table({"model": model, **engine, **fleet}),)
    if options := [*changed(engine_options, engine), *changed(fleet_options, fleet)]:
        raise typer.BadParameter(f"{', '.join(options)}: options of models stand in the fleet file")
    return read_fleet_file(Path(model))
