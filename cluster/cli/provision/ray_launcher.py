"""Ray's own `up` and `down`, run as commands on the operator's terminal."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import Literal

from ....proto.errors import ConfigError, ReplicaUnavailable
from ...fleet.ray.compat import RAY_COMMAND
from ...fleet.ray.local_cluster import restrict_token_file
from .cluster_file import ClusterFile

# provider, which is also quire's extra that installs the module |-> module that Ray needs to reach the provider.
_SDKS = {"aws": "boto3", "gcp": "googleapiclient", "azure": "azure.mgmt.compute"}


def check_sdk(provider: str) -> None:
    """Raise ConfigError, with the command that installs it, if the provider's library is missing."""
    module = _SDKS.get(provider)
    if module is not None and not _is_installed(module):
        raise ConfigError(
            f"{module} is not installed, and `ray` needs it for {provider}: pip install 'quire[{provider}]'"
        )


def run_ray(command: Literal["up", "down"], cluster: ClusterFile) -> None:
    """Run `ray up` or `ray down` on the file, without questions, its output on this terminal.

    Raises:
        ReplicaUnavailable: the command failed; its own output says why.
    """
    restrict_token_file()  # the nodes get a copy with the same mode
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
