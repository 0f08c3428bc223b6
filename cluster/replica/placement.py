"""Where a replica fits: what it asks of the cluster, on one node or over several, and why it has no place yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import yaml

from ...proto.config import EngineConfig
from ...proto.errors import ConfigError, joined_lines
from ..ray_runtime import compat
from ..ray_runtime.compat import AutoscalerStatus
from ..ray_runtime.errors import describe

Resources = Mapping[str, float]

STRICT_PACK = "STRICT_PACK"
PACK = "PACK"

# `ray up` leaves the file that it was given on the head node, here.
BOOTSTRAP_CONFIG = Path("~/ray_bootstrap_config.yaml")


@dataclass(frozen=True, slots=True)
class Node:
    """A live node.

    Attributes:
        total, free: by resource, ``CPU``, ``GPU`` and whatever the operator named.
    """

    node_id: str
    address: str
    total: Resources
    free: Resources


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of node that the autoscaler can add.

    Attributes:
        max_nodes: that it may have at once.
    """

    name: str
    resources: Resources
    max_nodes: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What placement knows of a Ray cluster.

    Attributes:
        node_types: empty where there is no autoscaler, or none whose configuration is known.
        launches: what the autoscaler says of nodes that it starts, or could not start; a line each.
    """

    nodes: tuple[Node, ...] = ()
    node_types: tuple[NodeType, ...] = ()
    launches: tuple[str, ...] = ()

    @staticmethod
    def read(autoscaling_config: str | None = None) -> ClusterView:
        """Of the cluster that this process is connected to.

        Args:
            autoscaling_config: the file that the autoscaler was started with; None: the one that `ray up` leaves on
                the head, if this is it.

        Raises:
            ConfigError: the file cannot be read.
        """
        node_types: tuple[NodeType, ...] = ()
        left_by_ray_up = BOOTSTRAP_CONFIG.expanduser()
        if autoscaling_config is not None:
            node_types = read_node_types(Path(autoscaling_config))
        elif left_by_ray_up.is_file():
            node_types = read_node_types(left_by_ray_up)
        return ClusterView(tuple(_live_nodes()), node_types, tuple(_read_launches()))


def bundles_for(config: EngineConfig, resources_per_rank: Resources | None = None) -> list[dict[str, float]]:
    """What a replica asks for: a bundle for the scheduler, then one a rank.

    Args:
        resources_per_rank: beside a CPU, and a GPU where the device is one.
    """
    gpu = {"GPU": 1.0} if config.parallel.device == "cuda" else {}
    rank = {"CPU": 1.0} | gpu | dict(resources_per_rank or {})
    return [{"CPU": 1.0}, *(dict(rank) for _ in range(config.parallel.tensor_parallel_size))]


def choose_strategy(
    bundles: Sequence[Resources], nodes: Iterable[Node], node_types: Iterable[NodeType]
) -> str:
    """``STRICT_PACK`` where one node, live or yet to be added, can hold all; else ``PACK``, over as few as can be.

    Ranks of one node meet in shared memory or over NVLink; a network is much slower.
    """
    needed = _sum(bundles)
    hosts = [node.total for node in nodes] + [kind.resources for kind in node_types if kind.max_nodes > 0]
    return STRICT_PACK if any(_holds(resources, needed) for resources in hosts) else PACK


def explain(bundles: Sequence[Resources], strategy: str, view: ClusterView) -> str:
    """One line on a replica without a place: what was asked, and what each node and node type could give."""
    needed = _sum(bundles)
    asked = f"replica needs {_in_words(needed)} "
    asked += (
        "on one node"
        if strategy == STRICT_PACK
        else f"over several nodes, a rank {_in_words(bundles[-1])} of them"
    )
    nodes = ", ".join(f"{node.address} has {_what_is_free(node, needed)}" for node in view.nodes)
    kinds = ", ".join(
        f"{kind.name} offers {_in_words(kind.resources, needed)} (max {kind.max_nodes} nodes)"
        for kind in view.node_types
    )
    parts = [
        asked,
        f"nodes: {nodes or 'none'}",
        f"node types: {kinds}" if kinds else "no autoscaler is known that could add nodes",
        *view.launches,
        _why_impossible(bundles, view),
    ]
    return "; ".join(part for part in parts if part)


def read_node_types(autoscaling_config: Path) -> tuple[NodeType, ...]:
    """The kinds of workers in a file for `ray up`, with the resources that it gives them.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        config = yaml.safe_load(autoscaling_config.read_text())
        most = int(config.get("max_workers", 0))
        return tuple(
            NodeType(
                name,
                {resource: float(amount) for resource, amount in (kind.get("resources") or {}).items()},
                min(most, int(kind.get("max_workers", most))),
            )
            for name, kind in config["available_node_types"].items()
            if name != config.get("head_node_type")
        )
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{autoscaling_config} is not a cluster file of Ray's autoscaler: {joined_lines(error)}"
        ) from error


def _live_nodes() -> Iterable[Node]:
    free = compat.free_resources()
    for node in ray.nodes():
        if node["Alive"]:
            node_id = node["NodeID"]
            yield Node(node_id, node["NodeManagerAddress"], node["Resources"], free.get(node_id, {}))


def _read_launches() -> list[str]:
    """Return a line per node type that the autoscaler starts or failed to start.

    An unreadable status is a line too: placement does not depend on it.
    """
    try:
        return _describe_launches(compat.autoscaler_status())
    except Exception as error:
        return [f"the autoscaler's status cannot be read: {describe(error)}"]


def _describe_launches(status: AutoscalerStatus) -> list[str]:
    pending = [f"{count} of {node_type} being started" for node_type, count in status.num_pending.items()]
    failed = [f"{node_type} could not be started: {reason}" for node_type, reason in status.failures]
    return pending + failed


def _why_impossible(bundles: Sequence[Resources], view: ClusterView) -> str:
    """What the cluster lacks even with all the nodes that it may have; empty where it lacks nothing."""
    offers = [(node.total, 1) for node in view.nodes] + [
        (kind.resources, kind.max_nodes) for kind in view.node_types
    ]
    most = _sum({name: count * amount for name, amount in resources.items()} for resources, count in offers)
    needed = _sum(bundles)
    if lacking := [name for name in sorted(needed) if needed[name] > most.get(name, 0.0)]:
        return f"the whole cluster, fully grown, has {_in_words(most, lacking)}"
    if not any(_holds(resources, bundles[-1]) for resources, count in offers if count):
        return f"no node or node type holds one rank: {_in_words(bundles[-1])}"
    return ""


def _sum(bundles: Iterable[Resources]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _holds(resources: Resources, needed: Resources) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in needed.items())


def _what_is_free(node: Node, names: Iterable[str]) -> str:
    return ", ".join(
        f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name} free" for name in sorted(names)
    )


def _in_words(resources: Resources, names: Iterable[str] | None = None) -> str:
    chosen = resources if names is None else names
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in sorted(chosen))
