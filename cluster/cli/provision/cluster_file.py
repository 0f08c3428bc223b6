"""ClusterFile: a file for `ray up`, checked before it starts machines that cost money."""

from __future__ import annotations

import copy
import csv
import functools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from ....proto.errors import ConfigError, Problems, first_line, joined_lines
from ...client.wire.tokens import load_tokens
from ...config.deployment import read_fleet_file
from ...config.tenants import load_tenants
from ...fleet.ray.compat import complete_cluster_file

EXAMPLES = ("aws", "gcp", "azure", "onprem", "kuberay")

_PLACEHOLDER = re.compile(r"<[a-z][a-z-]*>")
# provider |-> path of the machine type in its node_config.
_TYPE_PATHS: Mapping[str, tuple[str, ...]] = {
    "aws": ("InstanceType",),
    "gcp": ("machineType",),
    "azure": ("azure_arm_parameters", "vmSize"),
}


@dataclass(frozen=True, slots=True)
class NodeType:
    """A type of node in the file.

    Attributes:
        instance: the machine type's entry in quire's list; None if the list lacks it.
        is_spot: a spot instance, which the provider may take back.
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
    """The content of a file for `ray up`; made by `read`.

    Attributes:
        config: the file's settings with Ray's defaults filled in.
    """

    path: Path
    provider: str
    config: Mapping[str, Any]
    node_types: tuple[NodeType, ...]

    @staticmethod
    def read(path: Path) -> ClusterFile:
        """Read a file that Ray accepts and that has no placeholder left.

        Raises:
            ConfigError: the file cannot be read or used; says where and why.
        """
        try:
            text = path.read_text()
            documents = list(yaml.safe_load_all(text))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {joined_lines(error)}") from error
        problems = Problems()
        with problems:
            _refuse_manifest(path, documents)
        with problems:
            _refuse_placeholders(path, text)
        problems.raise_any()
        (raw,) = documents or [None]
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} is not a cluster file: it has no settings")
        config = _with_ray_defaults(path, raw)
        provider = str(config["provider"]["type"])
        head = config["head_node_type"]
        types = config["available_node_types"].items()
        nodes = tuple(_node_type(provider, name, settings, name == head) for name, settings in types)
        return ClusterFile(path, provider, config, nodes)

    def problems(self) -> list[str]:
        """Return a line per setting that would fail, cost too much, or expose the cluster; empty for a good file."""
        return [*self._security_problems(), *self._node_problems(), *mount_problems(self.path, self.config)]

    @property
    def location(self) -> str:
        """The provider and region of the nodes, or the addresses of local machines."""
        provider = self.config["provider"]
        if self.provider == "local":
            return f"{provider.get('head_ip')} and {len(provider.get('worker_ips', []))} machines"
        return f"{self.provider} {provider.get('region') or provider.get('location') or ''}".strip()

    def _security_problems(self) -> Iterator[str]:
        if self.provider != "local" and not self.config["provider"].get("use_internal_ips"):
            yield "provider.use_internal_ips is not true: every node gets a public address"
        for section in ("head_start_ray_commands", "worker_start_ray_commands"):
            for command in self.config.get(section, []):
                yield from (f"{section}: {problem}" for problem in _command_problems(command))
        if not any(target.endswith(".ray/auth_token") for target in self.config.get("file_mounts", {})):
            yield "file_mounts lacks ~/.ray/auth_token, the token that authenticates the nodes"
        for node in self.node_types if self.provider == "aws" else ():
            if not _has_security_groups(node):
                yield f"{node.name}: no SecurityGroupIds, so Ray creates a group that allows ssh from everywhere"

    def _node_problems(self) -> Iterator[str]:
        for node in self.node_types:
            if node.is_head and node.resources.get("GPU"):
                yield f"{node.name}: the head has GPUs and runs as long as the cluster: use a machine type without"
            if self.provider not in _TYPE_PATHS:
                continue
            if not _image(self.provider, node.node_config):
                yield f"{node.name}: no image, so Ray uses an old one: set one"
            if node.instance is None:
                yield f"{node.name}: machine type {node.machine!r} is not in quire's list: resources unchecked"
                continue
            for resource, offered in (("CPU", node.instance.cpus), ("GPU", node.instance.gpus)):
                if node.resources.get(resource, 0) != offered:
                    yield (
                        f"{node.name}: resources say {resource}: {node.resources.get(resource, 0):g}, "
                        f"must be {offered} for a {node.machine}"
                    )


def _command_problems(command: str) -> Iterator[str]:
    if "ray start" in command and "RAY_AUTH_MODE=token" not in command:
        yield "`ray start` without RAY_AUTH_MODE=token allows code from anyone"
    if "dashboard-host=0.0.0.0" in command:
        yield "--dashboard-host=0.0.0.0 exposes the dashboard to the whole network"
    if "quire serve" in command and "--insecure" in command:
        yield "`quire serve --insecure` serves everyone, without encryption"


def _has_security_groups(node: NodeType) -> bool:
    """Return whether an AWS node names its security groups, for itself or for each network interface."""
    interfaces = node.node_config.get("NetworkInterfaces") or [{}]
    return bool(node.node_config.get("SecurityGroupIds")) or all(each.get("Groups") for each in interfaces)


def example(name: str) -> str:
    """Return the text of a bundled file.

    Raises:
        ConfigError: no bundled file has that name.
    """
    if name not in EXAMPLES:
        raise ConfigError(f"there is no example {name!r}, must be one of {', '.join(EXAMPLES)}")
    return files(__package__).joinpath("files", f"{name}.yaml").read_text()


def _refuse_manifest(path: Path, documents: Sequence[Any]) -> None:
    if any(isinstance(document, dict) and "apiVersion" in document for document in documents):
        raise ConfigError(
            f"{path} is a manifest for Kubernetes, not a file for `ray up`: start it with kubectl apply -f {path}"
        )
    if len(documents) > 1:
        raise ConfigError(f"{path} has {len(documents)} YAML documents, must have one")


def _refuse_placeholders(path: Path, text: str) -> None:
    """Raise a ConfigError that names each placeholder with its first line."""
    first_lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for name in () if line.lstrip().startswith("#") else _PLACEHOLDER.findall(line):
            first_lines.setdefault(name, number)
    problems = [
        f"{path} line {number}: {name} is a placeholder, must be filled in"
        for name, number in first_lines.items()
    ]
    if problems:
        raise ConfigError.of(problems)


def _with_ray_defaults(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    try:
        return complete_cluster_file(copy.deepcopy(raw))
    except jsonschema.ValidationError as error:
        raise ConfigError(f"{path}: {error.json_path.removeprefix('$.')}: {error.message}") from error
    except Exception as error:  # Ray raises errors of any type for a faulty file
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


_START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
_PEM_BEGIN = "-----BEGIN "


def mount_problems(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per local file that is missing, empty or malformed.

    Args:
        path: place of the cluster file; relative paths begin at its folder.
        config: its settings.
    """
    needed = _paths_in_commands(config)
    for target, source in config.get("file_mounts", {}).items():
        local = path.parent / Path(source).expanduser()
        if not local.exists():
            yield f"file_mounts: {source} does not exist (relative paths begin at {path.parent})"
        elif local.is_dir():
            prefix = f"{target.rstrip('/')}/"
            for file in sorted(word.removeprefix(prefix) for word in needed if word.startswith(prefix)):
                yield from _file_problems(local / file)
        else:
            yield from _file_problems(local)


def _paths_in_commands(config: Mapping[str, Any]) -> set[str]:
    """Return the words of the nodes' start commands, some of which are paths of mounted files."""
    commands = [command for section in _START_COMMANDS for command in config.get(section, [])]
    words = set[str]()
    for command in commands:
        try:
            outer = shlex.split(command)
        except ValueError:  # unbalanced quotes; the shell will say so
            continue
        for word in outer:  # a quoted program, as of `sh -c`, holds words of its own
            words.update(part.strip(";'") for part in word.split())
    return words


def _file_problems(file: Path) -> Iterator[str]:
    if not file.is_file():
        yield f"{file} does not exist, and the gateway is started with it"
        return
    try:
        if not file.read_text().strip():
            yield f"{file} is empty"
            return
        check = _CHECKS.get(file.suffix or file.name)
        if check is not None:
            check(file)
    except ConfigError as error:
        yield str(error)
    except (OSError, UnicodeDecodeError) as error:
        yield f"{file} cannot be read: {error}"


def _check_toml(file: Path) -> None:
    if file.name == "fleet.toml":
        read_fleet_file(file)
    elif file.name == "tenants.toml":
        load_tenants(file)


def _check_pem(file: Path) -> None:
    if _PEM_BEGIN not in file.read_text():
        raise ConfigError(f"{file} is not a PEM file: it has no line that begins with {_PEM_BEGIN.strip()!r}")


# suffix or name of a file |-> its check, which raises ConfigError
_CHECKS: Mapping[str, Callable[[Path], object]] = {
    ".toml": _check_toml,
    "tokens": load_tokens,
    ".crt": _check_pem,
    ".key": _check_pem,
    ".pem": _check_pem,
}


@dataclass(frozen=True, slots=True)
class InstanceType:
    """A provider's machine type.

    Attributes:
        memory: GiB.
        gpu: the GPU's name; empty for a machine without GPUs.
        gpu_memory: GiB of one GPU.
    """

    provider: str
    name: str
    cpus: int
    memory: int
    gpus: int
    gpu: str
    gpu_memory: int

    @property
    def gpu_summary(self) -> str:
        """For example ``8 x H100 80 GiB``; ``none`` for a machine without GPUs."""
        return f"{self.gpus} x {self.gpu} {self.gpu_memory} GiB" if self.gpus else "none"


@functools.cache
def instance_types() -> Mapping[tuple[str, str], InstanceType]:
    """Return (provider, name) |-> its entry in the checked-in list."""
    text = files(__package__).joinpath("instance_types.csv").read_text()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    types = [
        InstanceType(
            provider=row["provider"],
            name=row["name"],
            cpus=int(row["cpus"]),
            memory=int(row["memory"]),
            gpus=int(row["gpus"]),
            gpu=row["gpu"],
            gpu_memory=int(row["gpu_memory"] or 0),
        )
        for row in rows
    ]
    return {(known.provider, known.name): known for known in types}
