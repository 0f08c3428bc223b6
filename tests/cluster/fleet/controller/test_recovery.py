"""A restarted controller adopts the replicas of its store."""

from __future__ import annotations

import pytest
from fake_fleet import FakeLauncher
from running_fleet import deployment, running

from benchmarks.in_memory import MemoryStore
from quire.cluster.config.deployment import ScalingLimits
from quire.cluster.fleet.controller.autoscaler import Decision, FleetSnapshot, ScalingState, decide
from quire.cluster.fleet.controller.fleet_state import ReplicaState


async def test_restarted_controller_adopts_live_replicas(launcher: FakeLauncher) -> None:
    store = MemoryStore()
    async with running(launcher, store) as first:
        await first.serve(3)
        kept, dead, lost = (entry.replica_id for entry in first.ready())
    # Between the two controllers one replica dies, and the record of another is lost.
    launcher.remove(dead)
    store.delete(f"replica/{lost}")
    async with running(launcher, store) as second:
        await second.until_ready(3)
        assert kept in {entry.replica_id for entry in second.ready()}
        assert {dead, lost} & launcher.known() == set()
        assert second.fleet.state().version != first.fleet.state().version


async def test_adopted_replica_sets_no_cold_start_time(
    launcher: FakeLauncher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshots: list[FleetSnapshot] = []

    def recording_decide(snapshot: FleetSnapshot, limits: ScalingLimits, state: ScalingState) -> Decision:
        snapshots.append(snapshot)
        return decide(snapshot, limits, state)

    monkeypatch.setattr("quire.cluster.fleet.controller.fleet.decide", recording_decide)
    store = MemoryStore()
    async with running(launcher, store) as first:
        await first.serve()
        await first.until(lambda: snapshots[-1].cold_start_s is not None)
    snapshots.clear()
    async with running(launcher, store) as second:
        await second.until_ready(1)
        await second.until(
            lambda: any(each.state is ReplicaState.READY for last in snapshots[-1:] for each in last.replicas)
        )
        assert snapshots[-1].cold_start_s is None


async def test_unreadable_store_entries_are_skipped(launcher: FakeLauncher) -> None:
    store = MemoryStore()
    store.texts = {"deployment/a": "{", "replica/b": "x\ny", "deployment/demo": deployment().to_json()}
    async with running(launcher, store) as fleet:
        await fleet.until_ready(1)
        assert [entry.deployment.name for entry in fleet.fleet.state().deployments] == ["demo"]
