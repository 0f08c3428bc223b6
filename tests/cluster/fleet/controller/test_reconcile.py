"""`plan`: the next actions towards a target."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.fleet.controller.fleet_state import ReplicaState
from quire.cluster.fleet.controller.reconcile import ROOM_PATIENCE_S, Plan, ReplicaView, plan

NEW, OLD = "new", "old"
NOW = 1000.0


def ready(name: str, version: str = NEW, **more: object) -> ReplicaView:
    return ReplicaView(name, version, ReplicaState.READY, **({"started_at": 0.0} | more))  # type: ignore[arg-type]


def starting(name: str, version: str = NEW, **more: object) -> ReplicaView:
    return replace(ready(name, version, **more), state=ReplicaState.STARTING)


def draining(name: str, version: str = NEW) -> ReplicaView:
    return replace(ready(name, version), state=ReplicaState.DRAINING)


@pytest.mark.parametrize(
    ("target", "replicas", "expected"),
    [
        pytest.param(0, [], Plan(), id="zero target"),
        pytest.param(3, [], Plan(num_starts=3), id="all missing"),
        pytest.param(3, [ready("a"), starting("b")], Plan(num_starts=1), id="starting replicas count"),
        pytest.param(2, [ready("a"), draining("b")], Plan(num_starts=1), id="draining replicas do not count"),
        pytest.param(
            1, [ready("a", num_requests=3), ready("b", num_requests=1)], Plan(drain=("b",)), id="less busy one drains"
        ),
        pytest.param(
            1, [ready("a"), starting("b", started_at=1.0), starting("c", started_at=2.0)], Plan(stop=("c", "b")),
            id="starting replicas stop before ready ones drain",
        ),
        pytest.param(0, [ready("a"), starting("b")], Plan(drain=("a",), stop=("b",)), id="to zero"),
        pytest.param(2, [ready("a", OLD), ready("b", OLD)], Plan(num_starts=1), id="new version starts beside it"),
        pytest.param(2, [ready("a", OLD), ready("b", OLD), starting("c")], Plan(), id="one replica at a time"),
        pytest.param(
            2, [ready("a", OLD, num_requests=1), ready("b", OLD), ready("c")], Plan(drain=("b",)),
            id="then an old replica drains",
        ),
        pytest.param(
            2, [ready("a", OLD), draining("b", OLD), ready("c")], Plan(num_starts=1), id="then the next one starts"
        ),
        pytest.param(1, [starting("a", OLD)], Plan(num_starts=1, stop=("a",)), id="starting old replica stops"),
        pytest.param(
            2, [starting("a", OLD, is_adopted=True), starting("b", OLD, is_adopted=True), starting("c")], Plan(),
            id="adopted replicas may serve and are not stopped",
        ),
        pytest.param(
            1, [starting("a", is_adopted=True), ready("b")], Plan(), id="adopted surplus is not stopped"
        ),
        pytest.param(0, [ready("a", OLD)], Plan(drain=("a",)), id="an old version with a target of zero"),
        pytest.param(
            2, [ready("a", drain_by=NOW + 60), ready("b")], Plan(num_starts=1, drain=("a",)),
            id="a departing replica drains if another is ready",
        ),
        pytest.param(
            1, [ready("a", drain_by=NOW + 60)], Plan(num_starts=1), id="only replica waits for its successor"
        ),
        pytest.param(
            1, [ready("a", drain_by=NOW)], Plan(num_starts=1, drain=("a",)), id="only replica drains at its deadline"
        ),
        pytest.param(
            1, [ready("a", drain_by=NOW + 60), ready("b")], Plan(drain=("a",)),
            id="a departing replica drains when its successor is ready",
        ),
        pytest.param(
            1, [ready("a", OLD), starting("b", no_room_since=NOW - ROOM_PATIENCE_S)], Plan(drain=("a",)),
            id="an old replica drains if its successor lacks room",
        ),
        pytest.param(
            1, [ready("a", OLD), starting("b", no_room_since=NOW - ROOM_PATIENCE_S + 1)], Plan(),
            id="lack of room counts after ROOM_PATIENCE_S",
        ),
    ],
)  # fmt: skip
def test_plan_returns_next_actions(target: int, replicas: list[ReplicaView], expected: Plan) -> None:
    assert plan(target, NEW, replicas, NOW) == expected


views = st.builds(
    ReplicaView,
    replica_id=st.uuids().map(str),
    version=st.sampled_from([NEW, OLD]),
    state=st.sampled_from(list(ReplicaState)),
    started_at=st.floats(0, NOW),
    num_requests=st.integers(0, 5),
    drain_by=st.none() | st.floats(NOW - 10, NOW + 10),
    no_room_since=st.none() | st.floats(NOW - 100, NOW),
    is_adopted=st.booleans(),
)


@given(st.integers(0, 6), st.lists(views, max_size=8, unique_by=lambda each: each.replica_id))
def test_repeated_plans_reach_the_target(target: int, replicas: list[ReplicaView]) -> None:
    """Carrying out plan after plan from any fleet ends with `target` ready replicas of the version."""
    fleet = {each.replica_id: each for each in replicas}
    for round_ in range(60):
        now = NOW + 20 * round_
        actions = plan(target, NEW, list(fleet.values()), now)
        live = [each for each in fleet.values() if each.state in (ReplicaState.STARTING, ReplicaState.READY)]
        assert {*actions.drain, *actions.stop} <= {each.replica_id for each in live}
        assert not set(actions.drain) & set(actions.stop)
        for name in (*actions.drain, *actions.stop):
            del fleet[name]
        for name, each in fleet.items():  # starting replicas become ready
            if each.state is ReplicaState.STARTING:
                fleet[name] = replace(each, state=ReplicaState.READY)
        for number in range(actions.num_starts):
            fleet[f"{round_}-{number}"] = starting(f"{round_}-{number}", started_at=now)
    left = [each for each in fleet.values() if each.state in (ReplicaState.STARTING, ReplicaState.READY)]
    assert len(left) == target
    assert all(each.version == NEW and each.drain_by is None for each in left)


@given(st.integers(1, 5), st.integers(0, 5))
def test_rolling_update_keeps_target_replicas_ready(target: int, num_new: int) -> None:
    fleet = [ready(f"old-{i}", OLD) for i in range(target)] + [ready(f"new-{i}") for i in range(num_new)]
    actions = plan(target, NEW, fleet, NOW)
    assert len(fleet) - len(actions.drain) >= target


def test_plan_compares_no_replica_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    num_compared = 0

    def equal(left: object, right: object) -> bool:
        nonlocal num_compared
        num_compared += 1
        return left is right

    monkeypatch.setattr(ReplicaView, "__eq__", equal)
    views = [ReplicaView(f"replica-{number}", "1", ReplicaState.READY, 0.0) for number in range(100)]
    assert plan(100, "1", views, 0.0) == Plan()
    assert num_compared == 0
