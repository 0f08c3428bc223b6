"""ClusterFile: a file for `ray up`, read and checked before anything is started that costs money."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from ...proto.errors import ConfigError, first_line, joined_lines
from ..ray_runtime.compat import complete_cluster_file
from .instance_types import InstanceType, instance_types

EXAMPLES = ("aws", "gcp", "azure", "onprem", "kuberay")

_PLACEHOLDER = re.compile(r"<[a-z][a-z-]*>")
# Where each provider's node_config names the machine type.
_TYPE_PATHS: Mapping[str, tuple[str, ...]] = {
    "aws": ("InstanceType",),
    "gcp": ("machineType",),
    "azure": ("azure_arm_parameters", "vmSize"),
}


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of node that the file allows.

    Attributes:
        instance: what quire's list says of its machine type; None where the list does not have it.
        is_spot: the provider may take it back.
    """

    name: str
    machine: str
    instance: InstanceType | None
    is_head: bool
    is_spot: bool
    min_workers: int
    max_workers: int
    resources: Mapping[str, float] = field(default_factory=dict)
    node_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A cluster as a file asks for it; `read` makes one.

    Attributes:
        config: the file with Ray's defaults filled in.
    """

    path: Path
    provider: str
    config: Mapping[str, Any]
    node_types: tuple[NodeType, ...]

    @staticmethod
    def read(path: Path) -> ClusterFile:
        """The file, in which Ray finds no fault and no value is left to fill in.

        Raises:
            ConfigError: it cannot be read, or not be used; says where and why.
        """
        try:
            text = path.read_text()
            raw = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {joined_lines(error)}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} is not a cluster file: it holds no settings")
        _refuse_placeholders(path, text)
        config = _with_ray_defaults(path, raw)
        provider = str(config["provider"]["type"])
        head = config["head_node_type"]
        types = config["available_node_types"].items()
        nodes = tuple(_node_type(provider, name, settings, name == head) for name, settings in types)
        return ClusterFile(path, provider, config, nodes)

    def problems(self) -> list[str]:
        """What would fail, cost more than meant, or open the cluster to others; empty for a good file."""
        return [*self._open_doors(), *self._wrong_nodes(), *self._missing_files()]

    @property
    def place(self) -> str:
        """Where the nodes will be, in words."""
        provider = self.config["provider"]
        if self.provider == "local":
            return f"{provider.get('head_ip')} and {len(provider.get('worker_ips', []))} machines"
        return f"{self.provider} {provider.get('region') or provider.get('location') or ''}".strip()

    def _open_doors(self) -> Iterator[str]:
        if self.provider != "local" and not self.config["provider"].get("use_internal_ips"):
            yield "provider.use_internal_ips is not true: every node gets a public address"
        for section in ("head_start_ray_commands", "worker_start_ray_commands"):
            for command in self.config.get(section, []):
                if "ray start" in command and "RAY_AUTH_MODE=token" not in command:
                    yield f"{section}: `ray start` without RAY_AUTH_MODE=token lets whoever reaches a port run code"
                if "dashboard-host=0.0.0.0" in command:
                    yield f"{section}: --dashboard-host=0.0.0.0 shows the dashboard to the whole network"
                if "quire serve" in command and "--insecure" in command:
                    yield f"{section}: `quire serve --insecure` answers everybody, in the clear"
        if not any(target.endswith(".ray/auth_token") for target in self.config.get("file_mounts", {})):
            yield "file_mounts lacks ~/.ray/auth_token, the token that nodes know each other by"
        for node in self.node_types if self.provider == "aws" else ():
            if not node.node_config.get("SecurityGroupIds"):
                yield f"{node.name}: no SecurityGroupIds, so Ray makes a group that admits ssh from everywhere"

    def _wrong_nodes(self) -> Iterator[str]:
        for node in self.node_types:
            if node.is_head and node.resources.get("GPU"):
                yield f"{node.name}: the head offers GPUs, so a replica may keep it from ever being cheap"
            if self.provider not in _TYPE_PATHS:
                continue
            if not _image(self.provider, node.node_config):
                yield f"{node.name}: no image, so Ray picks an old one"
            if node.instance is None:
                yield f"{node.name}: machine type {node.machine!r} is not in quire's list, what it has is not known"
                continue
            for resource, offered in (("CPU", node.instance.cpus), ("GPU", node.instance.gpus)):
                if node.resources.get(resource, 0) != offered:
                    yield (
                        f"{node.name}: resources say {resource}: {node.resources.get(resource, 0):g}, "
                        f"a {node.machine} has {offered}"
                    )

    def _missing_files(self) -> Iterator[str]:
        for source in self.config.get("file_mounts", {}).values():
            if not (self.path.parent / Path(source).expanduser()).exists():
                yield f"file_mounts: there is no {source} (relative paths begin at {self.path.parent})"


def example(name: str) -> str:
    """The text of a bundled file.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in EXAMPLES:
        raise ConfigError(f"there is no example {name!r}; there are {', '.join(EXAMPLES)}")
    return files(__package__).joinpath("files", f"{name}.yaml").read_text()


def _refuse_placeholders(path: Path, text: str) -> None:
    for number, line in enumerate(text.splitlines(), start=1):
        found = None if line.lstrip().startswith("#") else _PLACEHOLDER.search(line)
        if found:
            raise ConfigError(f"{path} line {number}: {found.group()} is left to fill in")


def _with_ray_defaults(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    try:
        return complete_cluster_file(copy.deepcopy(raw))
    except jsonschema.ValidationError as error:
        raise ConfigError(f"{path}: {error.json_path.removeprefix('$.')}: {error.message}") from error
    except Exception as error:  # Ray raises whatever it stumbles over
        raise ConfigError(f"{path}: Ray does not accept the file: {first_line(error)}") from error


def _node_type(provider: str, name: str, settings: Mapping[str, Any], is_head: bool) -> NodeType:
    node_config = settings.get("node_config") or {}
    machine = str(_find(node_config, _TYPE_PATHS.get(provider, ())) or "")
    return NodeType(
        name=name,
        machine=machine,
        instance=instance_types().get((provider, machine)),
        is_head=is_head,
        is_spot=_is_spot(provider, node_config),
        min_workers=settings.get("min_workers", 0),
        max_workers=settings.get("max_workers", 0),
        resources=settings.get("resources") or {},
        node_config=node_config,
    )


def _find(mapping: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = mapping
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if path else None


def _is_spot(provider: str, node_config: Mapping[str, Any]) -> bool:
    if provider == "aws":
        return bool(_find(node_config, ("InstanceMarketOptions", "MarketType")) == "spot")
    if provider == "gcp":
        scheduling = node_config.get("scheduling") or [{}]
        return any(
            entry.get("provisioningModel") == "SPOT" or entry.get("preemptible") for entry in scheduling
        )
    return bool(_find(node_config, ("azure_arm_parameters", "priority")) == "Spot")


def _image(provider: str, node_config: Mapping[str, Any]) -> Any:
    if provider == "aws":
        return node_config.get("ImageId")
    if provider == "gcp":
        disks = node_config.get("disks") or [{}]
        return _find(disks[0], ("initializeParams", "sourceImage"))
    return _find(node_config, ("azure_arm_parameters", "imageSku"))
