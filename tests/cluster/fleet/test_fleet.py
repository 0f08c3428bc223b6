"""The controller without Ray: replicas come and go as they are wanted, fail, drain and are taken over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_fleet import FakeLauncher, MemoryStore

from quire.cluster.config.deployment import Deployment
from quire.cluster.config.scaling_limits import ScalingLimits
from quire.cluster.controller_api.demand import Demand
from quire.cluster.controller_api.fleet_state import ReplicaEntry, ReplicaState
from quire.cluster.fleet.autoscaler import Decision, FleetSnapshot, ScalingState, decide
from quire.cluster.fleet.blocking_calls import MAX_CALLS
from quire.cluster.fleet.fleet import Fleet
from quire.proto.errors import InvalidRequest, ModelNotFound, ReplicaUnavailable

TICK_S = 0.02
DEADLINE_S = 60.0


def deployment(**options: Any) -> Deployment:
    return Deployment.from_table({"model": "demo", "drain_grace_s": 0.2, **options})


class Running:
    """A fleet at work."""

    def __init__(self, launcher: FakeLauncher, store: MemoryStore) -> None:
        self.launcher = launcher
        self.store = store
        self.fleet = Fleet(launcher, store, tick_s=TICK_S, canary_timeout_s=DEADLINE_S)

    def entries(self, *states: ReplicaState) -> list[ReplicaEntry]:
        return [entry for entry in self.fleet.state().replicas if not states or entry.state in states]

    def ready(self) -> list[ReplicaEntry]:
        return self.entries(ReplicaState.READY)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await self.fleet.watch(self.fleet.state().version, 0.05)

    async def until_ready(self, num_replicas: int, version: str | None = None) -> None:
        await self.until(
            lambda: (
                len(self.ready()) == num_replicas
                and not self.entries(ReplicaState.STARTING, ReplicaState.DRAINING)
                and all(version in (None, entry.version) for entry in self.ready())
            )
        )


@asynccontextmanager
async def running(launcher: FakeLauncher, store: MemoryStore | None = None) -> AsyncIterator[Running]:
    made = Running(launcher, store or MemoryStore())
    await made.fleet.recover()
    keeper = asyncio.create_task(made.fleet.run())
    try:
        yield made
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await made.fleet.close()


def run(scenario: Callable[[FakeLauncher], Coroutine[Any, Any, None]], **room: int) -> None:
    launcher = FakeLauncher(**room)
    try:
        asyncio.run(asyncio.wait_for(scenario(launcher), 2 * DEADLINE_S))
    finally:
        launcher.close()


def test_deployed_replicas_become_ready_and_deleted_ones_go() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment(min_replicas=2, max_replicas=2))
            await fleet.until_ready(2)
            assert all(entry.record is not None for entry in fleet.ready())
            with pytest.raises(ModelNotFound):
                await fleet.fleet.delete("other")
            await fleet.fleet.delete("demo")
            await fleet.until(lambda: not fleet.entries(ReplicaState.READY, ReplicaState.DRAINING))
        assert launcher.known() == set()
        assert fleet.store.texts == {}

    run(scenario)


def test_a_new_version_takes_over_one_by_one() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            old, new = (deployment(min_replicas=2, max_replicas=2, revision=name) for name in ("1", "2"))
            await fleet.fleet.deploy(old)
            await fleet.until_ready(2, old.version)
            fewest = 2

            def note() -> bool:
                nonlocal fewest
                fewest = min(fewest, len(fleet.ready()))
                return all(entry.version == new.version for entry in fleet.ready())

            await fleet.fleet.deploy(new)
            await fleet.until(note)
            await fleet.until_ready(2, new.version)
            assert fewest == 2
            assert len(launcher.launched) == 4

    run(scenario)


def test_other_limits_are_no_other_version() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment(min_replicas=1, max_replicas=1))
            await fleet.until_ready(1)
            (first,) = fleet.ready()
            await fleet.fleet.deploy(deployment(min_replicas=2, max_replicas=2))
            await fleet.until_ready(2)
            assert first.replica_id in {entry.replica_id for entry in fleet.ready()}

    run(scenario)


def test_a_failed_replica_is_replaced_and_told_of() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment())
            await fleet.until_ready(1)
            (first,) = fleet.ready()
            launcher.launched[first.replica_id].kill("rank 0 was killed")
            await fleet.until(lambda: bool(fleet.ready()) and fleet.ready()[0].replica_id != first.replica_id)
            (failed,) = fleet.entries(ReplicaState.FAILED)
            assert failed.replica_id == first.replica_id
            assert "rank 0 was killed" in failed.reason

    run(scenario)


def test_launches_that_fail_are_tried_again_ever_more_rarely() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        launcher.problem = ReplicaUnavailable("the weights are not there")
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment(min_replicas=3, max_replicas=3))
            await fleet.until(lambda: len(fleet.entries(ReplicaState.FAILED)) >= 4)
            # The first three at once, then one a second later.
            assert len(fleet.entries(ReplicaState.FAILED)) == 4
            (entry,) = fleet.fleet.state().deployments
            assert "the weights are not there" in entry.problem
            launcher.problem = None
            await fleet.fleet.deploy(deployment(min_replicas=3, max_replicas=3, revision="2"))
            await fleet.until_ready(3)

    run(scenario)


def test_a_replica_without_room_says_so() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment(min_replicas=2, max_replicas=2))
            await fleet.until(lambda: len(fleet.ready()) == 1)
            await fleet.until(
                lambda: any("waits for room: 1 fit" in entry.reason for entry in fleet.entries())
            )
            await fleet.fleet.deploy(deployment(min_replicas=1, max_replicas=1))
            await fleet.until(lambda: not fleet.entries(ReplicaState.STARTING))
            assert len(fleet.ready()) == 1

    run(scenario, room=1)


def test_launches_that_wait_for_room_hold_up_nothing_else() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            many = MAX_CALLS + 8
            await fleet.fleet.deploy(deployment(min_replicas=many, max_replicas=many))
            await fleet.until(
                lambda: sum("waits for room" in each.reason for each in fleet.entries()) == many - 1
            )
            await fleet.fleet.delete("demo")
            await fleet.until(lambda: len(launcher.removed) == many)
            assert launcher.known() == set()

    run(scenario, room=1)


def test_a_launch_that_is_given_up_before_it_has_a_place_leaves_nothing() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            launcher.may_place.clear()
            await fleet.fleet.deploy(deployment())
            await fleet.until(lambda: bool(fleet.entries(ReplicaState.STARTING)))
            await fleet.fleet.delete("demo")
            await fleet.until(lambda: bool(launcher.removed))  # of which there was nothing yet
            launcher.may_place.set()
            await fleet.until(lambda: bool(fleet.entries(ReplicaState.STOPPED)))
            assert launcher.launched == {}

    run(scenario)


def test_a_replica_that_cannot_be_ended_is_tried_again() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment())
            await fleet.until_ready(1)
            launcher.num_failing_removals = 1
            await fleet.fleet.delete("demo")
            await fleet.until(lambda: not launcher.known())
            await fleet.until(lambda: bool(fleet.entries(ReplicaState.STOPPED)))
            assert fleet.store.texts == {}

    run(scenario)


def test_a_model_is_deleted_once() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment())
            first, second = await asyncio.gather(
                fleet.fleet.delete("demo"), fleet.fleet.delete("demo"), return_exceptions=True
            )
            assert first is None
            assert isinstance(second, ModelNotFound)

    run(scenario)


def test_waiting_requests_wake_a_model_that_sleeps() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(
                deployment(
                    min_replicas=0, max_replicas=2, idle_timeout_s=0.3, down_delay_s=0.0, cooldown_s=0.0
                )
            )
            for _ in range(2):
                fleet.fleet.report("gateway", {"demo": Demand(1, 10, 1, 10), "unknown": Demand(1)})
                await fleet.until(lambda: bool(fleet.ready()))
                fleet.fleet.report("gateway", {"demo": Demand()})
                await fleet.until(lambda: not launcher.known())
            assert len(launcher.launched) == 2

    run(scenario)


def test_drained_replicas_and_nodes_are_left_once_others_serve() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment(min_replicas=2, max_replicas=2))
            await fleet.until_ready(2)
            first, second = fleet.ready()
            assert await fleet.fleet.drain(first.replica_id) == (first.replica_id,)
            await fleet.until(lambda: first.replica_id not in launcher.known())
            await fleet.until_ready(2)
            assert second.record is not None
            (node,) = second.record.node_ids
            assert await fleet.fleet.drain(node) == (second.replica_id,)
            assert launcher.cordoned == [node]
            await fleet.until(lambda: second.replica_id not in launcher.known())
            await fleet.until_ready(2)
            for target in ("", "replica-", "nowhere"):
                with pytest.raises(InvalidRequest, match="target"):
                    await fleet.fleet.drain(target)

    run(scenario)


def test_a_node_that_ray_drains_is_left() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment(min_replicas=2, max_replicas=2))
            await fleet.until_ready(2)
            first, _ = fleet.ready()
            assert first.record is not None
            launcher.draining[first.record.node_ids[0]] = 0.0
            await fleet.until(lambda: first.replica_id not in launcher.known())
            await fleet.until_ready(2)

    run(scenario)


def test_a_node_that_its_cloud_takes_back_is_left_in_time() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment())
            await fleet.until_ready(1)
            (first,) = fleet.ready()
            assert first.record is not None
            await fleet.until(lambda: bool(launcher.notices))
            launcher.notices[first.record.node_ids[0]].set_result(0.3)
            await fleet.until(lambda: first.replica_id not in launcher.known())
            await fleet.until_ready(1)
            entry = next(entry for entry in fleet.entries() if entry.replica_id == first.replica_id)
            assert entry.reason == "the cloud takes node node-0 back"

    run(scenario)


def test_another_controller_takes_over_what_lives() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        store = MemoryStore()
        async with running(launcher, store) as first:
            await first.fleet.deploy(deployment(min_replicas=3, max_replicas=3))
            await first.until_ready(3)
            kept, dead, lost = (entry.replica_id for entry in first.ready())
        # Meanwhile one dies, and of one the memory is lost.
        launcher.remove(dead)
        store.delete(f"replica/{lost}")
        async with running(launcher, store) as second:
            await second.until_ready(3)
            assert kept in {entry.replica_id for entry in second.ready()}
            assert {dead, lost} & launcher.known() == set()
            assert second.fleet.state().version != first.fleet.state().version

    run(scenario)


def test_a_replica_that_is_found_again_tells_nothing_of_how_long_a_start_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[FleetSnapshot] = []

    def watched(snapshot: FleetSnapshot, limits: ScalingLimits, state: ScalingState) -> Decision:
        seen.append(snapshot)
        return decide(snapshot, limits, state)

    monkeypatch.setattr("quire.cluster.fleet.fleet.decide", watched)

    async def scenario(launcher: FakeLauncher) -> None:
        store = MemoryStore()
        async with running(launcher, store) as first:
            await first.fleet.deploy(deployment())
            await first.until_ready(1)
            await first.until(lambda: seen[-1].cold_start_s is not None)
        seen.clear()
        async with running(launcher, store) as second:
            await second.until_ready(1)
            await second.until(
                lambda: any(replica.state is ReplicaState.READY for replica in seen[-1].replicas)
            )
            assert seen[-1].cold_start_s is None

    run(scenario)


def test_memory_that_cannot_be_read_is_left_out() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        store = MemoryStore()
        store.texts = {"deployment/a": "{", "replica/b": "x\ny", "deployment/demo": deployment().to_json()}
        async with running(launcher, store) as fleet:
            await fleet.until_ready(1)
            assert [entry.deployment.name for entry in fleet.fleet.state().deployments] == ["demo"]

    run(scenario)
