"""Reservation of the resources of a replica's processes, on nodes of the preferred labels where there are some."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from ....proto.errors import ReplicaUnavailable
from ..ray.launch_target import LaunchTarget
from .launch_progress import LaunchStage
from .placement import PACK, ClusterView, Resources, choose_strategy, explain_shortage
from .replica_names import placement_name

# Seconds between reports of why a placement waits.
_EXPLAIN_INTERVAL_S = 10.0
# A node with the preferred labels takes about two minutes to start; a cloud without one says so within seconds, but
# Ray's autoscaler asks it again and again.
PREFERENCE_TIMEOUT_S = 180.0
_REMOVE_TIMEOUT_S = 30.0
_POLL_S = 0.1

Report = Callable[[LaunchStage, object], None]


class Reservation:
    """The placement group of a replica.

    Args:
        bundles: resources of each process.
        report: called with the stage, and repeatedly with the reason while there is no room.

    Attributes:
        group: the latest placement group; empty before `reserve`.
    """

    def __init__(
        self, replica_id: str, bundles: Sequence[Resources], target: LaunchTarget, report: Report
    ) -> None:
        self.group: PlacementGroup = PlacementGroup.empty()
        self._replica_id = replica_id
        self._bundles = bundles
        self._target = target
        self._report = report
        self._strategy = PACK

    def reserve(self) -> tuple[str, ...]:
        """Reserve the resources; return the node of each bundle.

        Each of the target's label selectors but the last is tried for PREFERENCE_TIMEOUT_S.

        Raises:
            ReplicaUnavailable: there was no room in the target's time, or the group was removed meanwhile.
        """
        view = ClusterView.read(self._target.autoscaling_config)
        self._strategy = choose_strategy(self._bundles, view.nodes, view.node_types)
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
            [dict(bundle) for bundle in self._bundles],
            strategy=self._strategy,
            name=placement_name(self._replica_id, self._target.namespace),
            lifetime="detached" if self._target.is_detached else None,
            bundle_label_selector=[dict(selector) for _ in self._bundles] if selector else None,
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
        reason = explain_shortage(self._bundles, self._strategy, view)
        labels = ", ".join(f"{name}={value}" for name, value in selector.items())
        return f"{reason}; only nodes with {labels} are asked for" if labels else reason

    def _state(self) -> str:
        return str(placement_group_table(self.group).get("state", "REMOVED"))

    def _node_ids(self) -> tuple[str, ...]:
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        return tuple(nodes[bundle] for bundle in range(len(self._bundles)))
