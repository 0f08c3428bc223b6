"""Placement of a replica: its resource bundles, one node or several, their reservation, and why there is no room."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import yaml
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from ....proto.config import EngineConfig
from ....proto.errors import ConfigError, ReplicaUnavailable, joined_lines
from ....proto.model.parallel_split import ParallelSplit
from ..ray import compat
from ..ray.compat import AutoscalerStatus
from ..ray.errors import describe
from ..ray.launch_target import LaunchTarget
from .launch_progress import LaunchStage
from .rank_lookup import placement_name

Resources = Mapping[str, float]

STRICT_PACK = "STRICT_PACK"
PACK = "PACK"

# `ray up` leaves the file that it was given on the head node, here.
BOOTSTRAP_CONFIG = Path("~/ray_bootstrap_config.yaml")
# Seconds between reports of why a placement waits.
_EXPLAIN_INTERVAL_S = 10.0
# A node with the preferred labels takes about two minutes to start; a cloud without one says so within seconds, but
# Ray's autoscaler asks it again and again.
PREFERENCE_TIMEOUT_S = 180.0
_REMOVE_TIMEOUT_S = 30.0
_POLL_S = 0.1

_log = logging.getLogger(__name__)

Report = Callable[[LaunchStage, object], None]


@dataclass(frozen=True, slots=True)
class Node:
    """A live node.

    Attributes:
        total, free: resource |-> amount: ``CPU``, ``GPU`` and the operator's custom resources.
    """

    node_id: str
    address: str
    total: Resources
    free: Resources


@dataclass(frozen=True, slots=True)
class NodeType:
    """A type of node that the autoscaler can add.

    Attributes:
        max_nodes: limit of nodes of this type at once.
    """

    name: str
    resources: Resources
    max_nodes: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """State of a Ray cluster as placement needs it.

    Attributes:
        node_types: empty if there is no autoscaler, or its configuration is unknown.
        launches: a line per node type that the autoscaler is starting or could not start.
    """

    nodes: tuple[Node, ...] = ()
    node_types: tuple[NodeType, ...] = ()
    launches: tuple[str, ...] = ()

    @staticmethod
    def read(autoscaling_config: str | None = None) -> ClusterView:
        """Return the state of the cluster that this process is connected to.

        Args:
            autoscaling_config: path of the file that the autoscaler was started with; None for the file that
                `ray up` leaves on the head node, if it is there.

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
    """Return a replica's resource bundles: the scheduler's, then one per rank.

    Args:
        resources_per_rank: resources of each rank beside its CPU and, if it computes on one, its GPU.
    """
    gpu = {"GPU": 1.0} if config.parallel.device == "cuda" else {}
    rank = {"CPU": 1.0} | gpu | dict(resources_per_rank or {})
    return [{"CPU": 1.0}, *(dict(rank) for _ in range(config.parallel.num_ranks))]


def choose_strategy(
    bundles: Sequence[Resources], nodes: Iterable[Node], node_types: Iterable[NodeType]
) -> str:
    """Return ``STRICT_PACK`` if one node, live or addable, can hold all bundles; else ``PACK``, over few nodes.

    Ranks on one node communicate through shared memory or NVLink; a network is much slower.
    """
    needed = _sum(bundles)
    hosts = [node.total for node in nodes] + [each.resources for each in node_types if each.max_nodes > 0]
    return STRICT_PACK if any(_holds(resources, needed) for resources in hosts) else PACK


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The bundles and the strategy of a replica's placement group.

    Attributes:
        bundles: the bundles of the placement group; each is on one node.
        bundle_of: index of the bundle of each process: the scheduler, then each rank.
        unit: what a bundle after the first is of.
    """

    strategy: str
    bundles: tuple[Resources, ...]
    bundle_of: tuple[int, ...]
    unit: str = "rank"


def arrange(
    bundles: Sequence[Resources],
    split: ParallelSplit,
    nodes: Sequence[Node],
    node_types: Sequence[NodeType],
) -> Arrangement:
    """Return how to place a replica: on one node, or with a bundle for the ranks that should be on one, or per rank.

    The ranks of a stage sum after every layer, and are on one node if any can hold them: stages send each other one
    tensor per step. Otherwise those are that attend for the same sequences: other ranks only exchange tokens.

    Args:
        bundles: resources of the scheduler and of each rank.
    """
    strategy = choose_strategy(bundles, nodes, node_types)
    single = Arrangement(strategy, tuple(bundles), tuple(range(len(bundles))))
    if strategy == STRICT_PACK:
        return single
    scheduler, *ranks = bundles
    sharers = dict.fromkeys(split.sharers_of(rank) for rank in range(split.num_ranks))
    units = {
        "pipeline stage": [split.ranks_of(stage) for stage in range(split.pipeline)],
        "group of ranks that attend together": list(sharers),
    }
    for unit, groups in units.items():
        own = [_sum(ranks[rank] for rank in group) for group in groups]
        if 1 < len(groups) < split.num_ranks and choose_strategy(own[:1], nodes, node_types) == STRICT_PACK:
            bundle_of = (number for number, group in enumerate(groups, 1) for _ in group)
            return Arrangement(PACK, (scheduler, *own), (0, *bundle_of), unit)
    return single


def describe_places(split: ParallelSplit, nodes: Sequence[str]) -> str:
    """Return where the stages are and why it matters, for the log; empty for ranks on one node.

    Args:
        nodes: the node of each rank.
    """
    if len(set(nodes)) == 1:
        return ""
    places = []
    for stage in range(split.pipeline):
        own = dict.fromkeys(nodes[rank][:8] for rank in split.ranks_of(stage))
        name = str(split.stage(stage)) or f"all {split.tensor} ranks"
        shared = [{nodes[each] for each in split.sharers_of(rank)} for rank in split.ranks_of(stage)]
        crossing = ""
        if any(len(each) > 1 for each in shared):
            crossing = ", whose ranks sum over the network after every layer"
        elif len(own) > 1:
            crossing = ", which exchange tokens over the network in every layer"
        places.append(f"{name} on {' and '.join(own)}{crossing}")
    return "; ".join(places)


def explain_shortage(
    bundles: Sequence[Resources], strategy: str, view: ClusterView, unit: str = "rank"
) -> str:
    """Return one line on a replica without room: its resources, and those of each node and node type.

    Args:
        unit: as in Arrangement.
    """
    needed = _sum(bundles)
    spread = (
        "on one node"
        if strategy == STRICT_PACK
        else f"over several nodes, each {unit} {_format(bundles[-1])}"
    )
    nodes = ", ".join(f"{node.address} has {_format_free(node, needed)}" for node in view.nodes)
    node_types = ", ".join(
        f"{each.name} offers {_format(each.resources, needed)} (max {each.max_nodes} nodes)"
        for each in view.node_types
    )
    parts = [
        f"replica needs {_format(needed)} {spread}",
        f"nodes: {nodes or 'none'}",
        f"node types: {node_types}" if node_types else "no autoscaler is known that could add nodes",
        *view.launches,
        _hard_limit(bundles, view, unit),
    ]
    return "; ".join(part for part in parts if part)


def nearest_split(bundles: Sequence[Resources], split: ParallelSplit, view: ClusterView) -> str:
    """Return which sizes the cluster could place, fully grown, if it cannot place a replica; empty if it can.

    A smaller tensor-parallel size divides the wanted one, so that it divides the model's heads too.

    Args:
        bundles: resources of the scheduler and of each rank.
    """
    scheduler, rank = bundles[0], bundles[1]
    offers = [each.total for each in view.nodes]
    offers += [
        each.resources for each in view.node_types for _ in range(min(each.max_nodes, split.num_ranks))
    ]
    if _can_pack(scheduler, rank, split.num_ranks, offers):
        return ""
    found = [
        (pipeline * tensor, tensor, pipeline)
        for tensor in range(1, split.tensor + 1)
        if split.tensor % tensor == 0
        for pipeline in range(1, split.num_ranks // tensor + 1)
        if _can_pack(scheduler, _sum([rank] * tensor), pipeline, offers)
    ]
    if not found:
        return ""
    _, tensor, pipeline = max(found)
    return (
        f"pipeline_parallel_size {pipeline} with tensor_parallel_size {tensor} would be placed; `quire fit` tells "
        "whether the model fits"
    )


def _can_pack(scheduler: Resources, bundle: Resources, count: int, offers: Sequence[Resources]) -> bool:
    """Return whether nodes that are empty hold so many equal bundles beside the scheduler."""
    numbers = [_num_bundles(bundle, offer) for offer in offers]
    return any(
        sum(numbers) - number + _num_bundles(bundle, _without(offer, scheduler)) >= count
        for number, offer in zip(numbers, offers, strict=True)
        if _holds(offer, scheduler)
    )


def _num_bundles(bundle: Resources, offer: Resources) -> int:
    return min(int(offer.get(name, 0.0) // amount) for name, amount in bundle.items() if amount)


def _without(offer: Resources, taken: Resources) -> Resources:
    return {name: amount - taken.get(name, 0.0) for name, amount in offer.items()}


def read_node_types(autoscaling_config: Path) -> tuple[NodeType, ...]:
    """Return the worker node types of a file for `ray up`, with their resources.

    Raises:
        ConfigError: the file cannot be read or is not such a file.
    """
    try:
        config = yaml.safe_load(autoscaling_config.read_text())
        max_workers = int(config.get("max_workers", 0))
        return tuple(
            NodeType(
                name,
                {resource: float(amount) for resource, amount in (settings.get("resources") or {}).items()},
                min(max_workers, int(settings.get("max_workers", max_workers))),
            )
            for name, settings in config["available_node_types"].items()
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


def _hard_limit(bundles: Sequence[Resources], view: ClusterView, unit: str) -> str:
    """Return why the bundles fit not even with every node that may be added; empty if they do fit."""
    offers = [(node.total, 1) for node in view.nodes] + [
        (each.resources, each.max_nodes) for each in view.node_types
    ]
    most = _sum({name: count * amount for name, amount in resources.items()} for resources, count in offers)
    needed = _sum(bundles)
    if lacking := [name for name in sorted(needed) if needed[name] > most.get(name, 0.0)]:
        return f"the whole cluster, fully grown, has {_format(most, lacking)}"
    if not any(_holds(resources, bundles[-1]) for resources, count in offers if count):
        return f"no node or node type holds one {unit}: {_format(bundles[-1])}"
    return ""


def _sum(bundles: Iterable[Resources]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _holds(resources: Resources, needed: Resources) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in needed.items())


def _format_free(node: Node, names: Iterable[str]) -> str:
    return ", ".join(
        f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name} free" for name in sorted(names)
    )


def _format(resources: Resources, names: Iterable[str] | None = None) -> str:
    chosen = resources if names is None else names
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in sorted(chosen))


class Reservation:
    """The placement group of a replica.

    Args:
        bundles: resources of each process.
        split: how the ranks share the model.
        report: called with the stage, and repeatedly with the reason while there is no room.

    Attributes:
        group: the latest placement group; empty before `reserve`.
        arrangement: the arrangement of its bundles.
    """

    def __init__(
        self,
        replica_id: str,
        bundles: Sequence[Resources],
        split: ParallelSplit,
        target: LaunchTarget,
        report: Report,
    ) -> None:
        self.group: PlacementGroup = PlacementGroup.empty()
        self._replica_id = replica_id
        self._bundles, self._split = bundles, split
        self._target = target
        self._report = report
        self.arrangement = Arrangement(PACK, tuple(bundles), tuple(range(len(bundles))))

    def reserve(self) -> tuple[str, ...]:
        """Reserve the resources; return the node of each process.

        Each of the target's label selectors but the last is tried for PREFERENCE_TIMEOUT_S.

        Raises:
            ReplicaUnavailable: there was no room in the target's time, or the group was removed meanwhile.
        """
        view = ClusterView.read(self._target.autoscaling_config)
        self.arrangement = arrange(self._bundles, self._split, view.nodes, view.node_types)
        deadline = time.monotonic() + self._target.placement_timeout_s
        *preferred, last = self._target.node_selectors
        for selector in preferred:
            if self._wait(selector, min(deadline, time.monotonic() + PREFERENCE_TIMEOUT_S)):
                return self._node_ids()
            self._remove()
        if self._wait(last, deadline):
            return self._node_ids()
        raise ReplicaUnavailable(f"no room in {self._target.placement_timeout_s:g} s: {self._shortage(last)}")

    def _wait(self, selector: Mapping[str, str], deadline: float) -> bool:
        """Ask for nodes with these labels; return whether there was room before the deadline."""
        self.group = placement_group(
            [dict(bundle) for bundle in self.arrangement.bundles],
            strategy=self.arrangement.strategy,
            name=placement_name(self._replica_id, self._target.namespace),
            lifetime="detached" if self._target.is_detached else None,
            bundle_label_selector=[dict(selector) for _ in self.arrangement.bundles] if selector else None,
        )
        # From here on `remove_replica` finds the placement. A removal requested earlier is raised by `on_progress`.
        self._report(LaunchStage.PLACING, "")
        while not self.group.wait(max(0.0, min(_EXPLAIN_INTERVAL_S, deadline - time.monotonic()))):
            reason = self._shortage(selector)
            if self._state() == "REMOVED":
                raise ReplicaUnavailable(f"{self._replica_id} was removed before it was placed: {reason}")
            if time.monotonic() >= deadline:
                return False
            self._report(LaunchStage.WAITING_FOR_ROOM, reason)
        return True

    def _remove(self) -> None:
        """Give up the placement group, whose name the next one takes."""
        remove_placement_group(self.group)
        deadline = time.monotonic() + _REMOVE_TIMEOUT_S
        while self._state() != "REMOVED":
            if time.monotonic() >= deadline:
                raise ReplicaUnavailable(
                    f"Ray did not remove the placement group of {self._replica_id} in {_REMOVE_TIMEOUT_S:g} s"
                )
            time.sleep(_POLL_S)

    def _shortage(self, selector: Mapping[str, str]) -> str:
        view = ClusterView.read(self._target.autoscaling_config)
        arrangement = self.arrangement
        reason = explain_shortage(arrangement.bundles, arrangement.strategy, view, arrangement.unit)
        if nearest := nearest_split(self._bundles, self._split, view):
            reason += f"; {nearest}"
        labels = ", ".join(f"{name}={value}" for name, value in selector.items())
        return f"{reason}; only nodes with {labels} are asked for" if labels else reason

    def _state(self) -> str:
        return str(placement_group_table(self.group).get("state", "REMOVED"))

    def _node_ids(self) -> tuple[str, ...]:
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        places = tuple(nodes[bundle] for bundle in self.arrangement.bundle_of)
        if where := describe_places(self._split, places[1:]):
            _log.info("%s is over several nodes: %s", self._replica_id, where)
        return places
