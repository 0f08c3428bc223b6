"""Ray's own `up` and `down`, run as commands: they talk to the cloud, and to the operator."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import Literal

from ...proto.errors import ConfigError, ReplicaUnavailable
from ..ray_runtime.compat import RAY_COMMAND
from .cluster_file import ClusterFile

# What Ray imports to reach a provider, and the extra of quire that installs it.
_SDKS = {"aws": "boto3", "gcp": "googleapiclient", "azure": "azure.mgmt.compute"}


def check_sdk(provider: str) -> None:
    """Raises ConfigError, with the line that installs it, when the provider's library is missing here."""
    module = _SDKS.get(provider)
    if module is not None and not _is_installed(module):
        raise ConfigError(f"{module} is needed to reach {provider}: pip install 'quire[{provider}]'")


def run_ray(command: Literal["up", "down"], cluster: ClusterFile) -> None:
    """Runs `ray up` or `ray down` on the file, its output on this terminal; asks nothing.

    Raises:
        ReplicaUnavailable: the command failed; its own output says why.
    """
    arguments = ["--yes", "--disable-usage-stats"] if command == "up" else ["--yes"]
    ray = [*RAY_COMMAND, command, cluster.path.name, *arguments]
    # Paths in the file are relative to it.
    status = subprocess.run(ray, cwd=cluster.path.parent, check=False).returncode
    if status:
        raise ReplicaUnavailable(
            f"`ray {command}` failed with exit status {status}; its output above says why"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
