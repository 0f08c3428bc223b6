"""The steps towards the replicas that are wanted, as a pure function."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.controller_api.fleet_state import ReplicaState
from quire.cluster.fleet.reconcile import ROOM_PATIENCE_S, Plan, ReplicaView, plan

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
        pytest.param(0, [], Plan(), id="nothing is wanted"),
        pytest.param(3, [], Plan(num_starts=3), id="all are missing"),
        pytest.param(3, [ready("a"), starting("b")], Plan(num_starts=1), id="those on their way count"),
        pytest.param(2, [ready("a"), draining("b")], Plan(num_starts=1), id="those that drain do not count"),
        pytest.param(
            1, [ready("a", num_requests=3), ready("b", num_requests=1)], Plan(drain=("b",)), id="the idler one goes"
        ),
        pytest.param(
            1, [ready("a"), starting("b", started_at=1.0), starting("c", started_at=2.0)], Plan(stop=("c", "b")),
            id="what serves nobody goes before what serves",
        ),
        pytest.param(0, [ready("a"), starting("b")], Plan(drain=("a",), stop=("b",)), id="to zero"),
        pytest.param(2, [ready("a", OLD), ready("b", OLD)], Plan(num_starts=1), id="a new version starts beside"),
        pytest.param(2, [ready("a", OLD), ready("b", OLD), starting("c")], Plan(), id="one at a time"),
        pytest.param(
            2, [ready("a", OLD, num_requests=1), ready("b", OLD), ready("c")], Plan(drain=("b",)),
            id="then an old one drains",
        ),
        pytest.param(
            2, [ready("a", OLD), draining("b", OLD), ready("c")], Plan(num_starts=1), id="and the next one starts"
        ),
        pytest.param(1, [starting("a", OLD)], Plan(num_starts=1, stop=("a",)), id="an old one that starts is ended"),
        pytest.param(0, [ready("a", OLD)], Plan(drain=("a",)), id="an old one of a model scaled to zero"),
        pytest.param(
            2, [ready("a", drain_by=NOW + 60), ready("b")], Plan(num_starts=1, drain=("a",)),
            id="a node is left at once where another serves",
        ),
        pytest.param(
            1, [ready("a", drain_by=NOW + 60)], Plan(num_starts=1), id="the only one waits for its successor"
        ),
        pytest.param(
            1, [ready("a", drain_by=NOW)], Plan(num_starts=1, drain=("a",)), id="but not beyond its deadline"
        ),
        pytest.param(
            1, [ready("a", drain_by=NOW + 60), ready("b")], Plan(drain=("a",)), id="its successor is there"
        ),
        pytest.param(
            1, [ready("a", OLD), starting("b", no_room_since=NOW - ROOM_PATIENCE_S)], Plan(drain=("a",)),
            id="where there is no room for both, the old one makes it",
        ),
        pytest.param(
            1, [ready("a", OLD), starting("b", no_room_since=NOW - ROOM_PATIENCE_S + 1)], Plan(),
            id="which takes a while to believe",
        ),
    ],
)  # fmt: skip
def test_next_steps(target: int, replicas: list[ReplicaView], expected: Plan) -> None:
    assert plan(target, NEW, replicas, NOW) == expected


standings = st.builds(
    ReplicaView,
    replica_id=st.uuids().map(str),
    version=st.sampled_from([NEW, OLD]),
    state=st.sampled_from(list(ReplicaState)),
    started_at=st.floats(0, NOW),
    num_requests=st.integers(0, 5),
    drain_by=st.none() | st.floats(NOW - 10, NOW + 10),
    no_room_since=st.none() | st.floats(NOW - 100, NOW),
)


@given(st.integers(0, 6), st.lists(standings, max_size=8, unique_by=lambda each: each.replica_id))
def test_any_fleet_becomes_what_is_wanted(target: int, replicas: list[ReplicaView]) -> None:
    """Whatever stands there, carrying out plan after plan ends with `target` ready replicas of the version."""
    fleet = {each.replica_id: each for each in replicas}
    for round_ in range(60):
        now = NOW + 20 * round_
        todo = plan(target, NEW, list(fleet.values()), now)
        live = [each for each in fleet.values() if each.state in (ReplicaState.STARTING, ReplicaState.READY)]
        assert {*todo.drain, *todo.stop} <= {each.replica_id for each in live}
        assert not set(todo.drain) & set(todo.stop)
        for name in (*todo.drain, *todo.stop):
            del fleet[name]
        for name, each in fleet.items():  # what starts becomes ready
            if each.state is ReplicaState.STARTING:
                fleet[name] = replace(each, state=ReplicaState.READY)
        for number in range(todo.num_starts):
            fleet[f"{round_}-{number}"] = starting(f"{round_}-{number}", started_at=now)
    left = [each for each in fleet.values() if each.state in (ReplicaState.STARTING, ReplicaState.READY)]
    assert len(left) == target
    assert all(each.version == NEW and each.drain_by is None for each in left)


@given(st.integers(1, 5), st.integers(0, 5))
def test_a_rolling_update_keeps_as_many_ready_as_are_wanted(target: int, num_new: int) -> None:
    fleet = [ready(f"old-{i}", OLD) for i in range(target)] + [ready(f"new-{i}") for i in range(num_new)]
    todo = plan(target, NEW, fleet, NOW)
    assert len(fleet) - len(todo.drain) >= target
