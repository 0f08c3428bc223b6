"""Fleet without Ray: replicas start, drain, fail and are adopted."""

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


class RunningFleet:
    """A running fleet."""

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
async def running(launcher: FakeLauncher, store: MemoryStore | None = None) -> AsyncIterator[RunningFleet]:
    fleet = RunningFleet(launcher, store or MemoryStore())
    await fleet.fleet.recover()
    runner = asyncio.create_task(fleet.fleet.run())
    try:
        yield fleet
    finally:
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
        await fleet.fleet.close()


def run(scenario: Callable[[FakeLauncher], Coroutine[Any, Any, None]], **room: int) -> None:
    launcher = FakeLauncher(**room)
    try:
        asyncio.run(asyncio.wait_for(scenario(launcher), 2 * DEADLINE_S))
    finally:
        launcher.close()


def test_deployed_replicas_become_ready_and_deleted_replicas_end() -> None:
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


def test_new_version_replaces_replicas_one_by_one() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            old, new = (deployment(min_replicas=2, max_replicas=2, revision=name) for name in ("1", "2"))
            await fleet.fleet.deploy(old)
            await fleet.until_ready(2, old.version)
            fewest = 2

            def updated() -> bool:
                nonlocal fewest
                fewest = min(fewest, len(fleet.ready()))
                return all(entry.version == new.version for entry in fleet.ready())

            await fleet.fleet.deploy(new)
            await fleet.until(updated)
            await fleet.until_ready(2, new.version)
            assert fewest == 2
            assert len(launcher.launched) == 4

    run(scenario)


def test_changed_limits_keep_the_version() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment(min_replicas=1, max_replicas=1))
            await fleet.until_ready(1)
            (first,) = fleet.ready()
            await fleet.fleet.deploy(deployment(min_replicas=2, max_replicas=2))
            await fleet.until_ready(2)
            assert first.replica_id in {entry.replica_id for entry in fleet.ready()}

    run(scenario)


def test_failed_replica_is_replaced_and_listed() -> None:
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


def test_failed_launches_are_retried_with_backoff() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        launcher.problem = ReplicaUnavailable("the weights are not there")
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment(min_replicas=3, max_replicas=3))
            await fleet.until(lambda: len(fleet.entries(ReplicaState.FAILED)) >= 4)
            # Three at once, then one after a second.
            assert len(fleet.entries(ReplicaState.FAILED)) == 4
            (entry,) = fleet.fleet.state().deployments
            assert "the weights are not there" in entry.problem
            launcher.problem = None
            await fleet.fleet.deploy(deployment(min_replicas=3, max_replicas=3, revision="2"))
            await fleet.until_ready(3)

    run(scenario)


def test_replica_without_room_reports_it() -> None:
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


def test_launches_waiting_for_room_block_no_other_calls() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            count = MAX_CALLS + 8
            await fleet.fleet.deploy(deployment(min_replicas=count, max_replicas=count))
            await fleet.until(
                lambda: sum("waits for room" in each.reason for each in fleet.entries()) == count - 1
            )
            await fleet.fleet.delete("demo")
            await fleet.until(lambda: len(launcher.removed) == count)
            assert launcher.known() == set()

    run(scenario, room=1)


def test_launch_canceled_before_placement_leaves_nothing() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            launcher.may_place.clear()
            await fleet.fleet.deploy(deployment())
            await fleet.until(lambda: bool(fleet.entries(ReplicaState.STARTING)))
            await fleet.fleet.delete("demo")
            await fleet.until(lambda: bool(launcher.removed))  # before anything was started
            launcher.may_place.set()
            await fleet.until(lambda: bool(fleet.entries(ReplicaState.STOPPED)))
            assert launcher.launched == {}

    run(scenario)


def test_failed_removal_is_retried() -> None:
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


def test_concurrent_deletes_succeed_once() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        async with running(launcher) as fleet:
            await fleet.fleet.deploy(deployment())
            first, second = await asyncio.gather(
                fleet.fleet.delete("demo"), fleet.fleet.delete("demo"), return_exceptions=True
            )
            assert first is None
            assert isinstance(second, ModelNotFound)

    run(scenario)


def test_waiting_requests_scale_a_model_from_zero() -> None:
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


def test_drained_replicas_and_nodes_are_replaced() -> None:
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


def test_replica_on_a_node_drained_by_ray_is_replaced() -> None:
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


def test_replica_on_a_preempted_node_is_replaced() -> None:
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


def test_restarted_controller_adopts_live_replicas() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        store = MemoryStore()
        async with running(launcher, store) as first:
            await first.fleet.deploy(deployment(min_replicas=3, max_replicas=3))
            await first.until_ready(3)
            kept, dead, lost = (entry.replica_id for entry in first.ready())
        # Between the two controllers one replica dies, and the record of another is lost.
        launcher.remove(dead)
        store.delete(f"replica/{lost}")
        async with running(launcher, store) as second:
            await second.until_ready(3)
            assert kept in {entry.replica_id for entry in second.ready()}
            assert {dead, lost} & launcher.known() == set()
            assert second.fleet.state().version != first.fleet.state().version

    run(scenario)


def test_adopted_replica_sets_no_cold_start_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[FleetSnapshot] = []

    def recording_decide(snapshot: FleetSnapshot, limits: ScalingLimits, state: ScalingState) -> Decision:
        seen.append(snapshot)
        return decide(snapshot, limits, state)

    monkeypatch.setattr("quire.cluster.fleet.fleet.decide", recording_decide)

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


def test_unreadable_store_entries_are_skipped() -> None:
    async def scenario(launcher: FakeLauncher) -> None:
        store = MemoryStore()
        store.texts = {"deployment/a": "{", "replica/b": "x\ny", "deployment/demo": deployment().to_json()}
        async with running(launcher, store) as fleet:
            await fleet.until_ready(1)
            assert [entry.deployment.name for entry in fleet.fleet.state().deployments] == ["demo"]

    run(scenario)
