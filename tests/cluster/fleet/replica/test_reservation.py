"""Reservations of resources, with stand-ins for Ray's placement groups, and on nodes with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cluster.fleet.replica import placement as module
from quire.cluster.fleet.replica.launch_progress import LaunchStage
from quire.cluster.fleet.replica.placement import ClusterView, Reservation
from quire.proto.errors import ReplicaUnavailable
from quire.proto.model.parallel_split import ParallelSplit

BUNDLES = [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
SPOT, ON_DEMAND = {"quire.io/spot": "true"}, {"quire.io/spot": "false"}


class Groups:
    """Ray's placement groups: those with one of some label selectors have room."""

    def __init__(self, *with_room: Mapping[str, str]) -> None:
        self.with_room = with_room
        self.requested: list[Mapping[str, str]] = []
        self.removed: list[int] = []

    def create(self, bundles: list[Any], **options: Any) -> Any:
        selectors = options["bundle_label_selector"] or [{}] * len(bundles)
        assert selectors == [selectors[0]] * len(bundles)
        assert len(self.removed) == len(self.requested), "two groups have one name"
        self.requested.append(selectors[0])
        return SimpleNamespace(
            number=len(self.requested), wait=lambda timeout_s: selectors[0] in self.with_room
        )

    def remove(self, group: Any) -> None:
        self.removed.append(group.number)

    def table(self, group: Any) -> dict[str, Any]:
        state = "REMOVED" if group.number in self.removed else "PENDING"
        return {"state": state, "bundles_to_node_id": {0: "a", 1: "b"}}


def reservation(
    monkeypatch: pytest.MonkeyPatch, groups: Groups, selectors: Sequence[Mapping[str, str]], report: Any
) -> Reservation:
    monkeypatch.setattr(module, "placement_group", groups.create)
    monkeypatch.setattr(module, "remove_placement_group", groups.remove)
    monkeypatch.setattr(module, "placement_group_table", groups.table)
    monkeypatch.setattr(module, "PREFERENCE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(ClusterView, "read", lambda *_: ClusterView())
    target: Any = SimpleNamespace(
        namespace="n", is_detached=True, placement_timeout_s=0.0, autoscaling_config=None, node_selectors=selectors
    )  # fmt: skip
    return Reservation("replica-1", BUNDLES, ParallelSplit(), target, report)


@pytest.mark.parametrize(
    ("with_room", "requested"),
    [([SPOT, ON_DEMAND], [SPOT]), ([ON_DEMAND], [SPOT, ON_DEMAND])],
    ids=["spot machines", "none, so on demand"],
)
def test_nodes_of_the_preferred_labels_are_asked_for_first(
    with_room: list[Mapping[str, str]], requested: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, stages = Groups(*with_room), []
    made = reservation(monkeypatch, groups, (SPOT, ON_DEMAND), lambda stage, _: stages.append(stage))
    assert made.reserve() == ("a", "b")
    assert groups.requested == requested
    assert made.group.number == len(requested)
    assert stages == [LaunchStage.PLACING] * len(requested)


def test_shortage_names_the_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reservation(monkeypatch, Groups(), (SPOT,), lambda *_: None)
    with pytest.raises(
        ReplicaUnavailable, match=r"no room in 0 s.* only nodes with quire\.io/spot=true are asked"
    ):
        made.reserve()


def test_nodes_without_labels_are_taken_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups({})
    assert reservation(monkeypatch, groups, ({},), lambda *_: None).reserve() == ("a", "b")
    assert groups.requested == [{}]
