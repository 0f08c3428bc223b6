"""Replicas of a fleet without Ray: started, updated, failed, scaled and removed."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from fake_fleet import FakeLauncher
from running_fleet import DEADLINE_S, deployment, running

from benchmarks.in_memory import MemoryStore
from quire.cluster.config.deployment import ScalingLimits
from quire.cluster.fleet.controller.autoscaler import Decision, FleetSnapshot, ScalingState
from quire.cluster.fleet.controller.fleet import REASON_INTERVAL_S, Fleet
from quire.cluster.fleet.controller.fleet_state import Demand, ReplicaState
from quire.cluster.fleet.controller.interfaces import MAX_CALLS
from quire.proto.errors import InvalidRequest, ModelNotFound, ReplicaUnavailable


async def test_deployed_replicas_become_ready_and_deleted_replicas_end(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        await fleet.serve(2)
        assert all(entry.record is not None for entry in fleet.ready())
        with pytest.raises(ModelNotFound):
            await fleet.fleet.delete("other")
        await fleet.fleet.delete("demo")
        await fleet.until(lambda: not fleet.entries(ReplicaState.READY, ReplicaState.DRAINING))
    assert launcher.known() == set()
    assert fleet.store.texts == {}


async def test_new_version_replaces_replicas_one_by_one(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        old, new = (deployment(min_replicas=2, max_replicas=2, weights_version=name) for name in ("1", "2"))
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


async def test_changed_limits_keep_the_version(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        (first,) = await fleet.serve(1)
        await fleet.serve(2)
        assert first.replica_id in {entry.replica_id for entry in fleet.ready()}


async def test_failed_replica_is_replaced_and_listed(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        (first,) = await fleet.serve()
        launcher.launched[first.replica_id].kill("rank 0 was killed")
        await fleet.until(lambda: bool(fleet.ready()) and fleet.ready()[0].replica_id != first.replica_id)
        (failed,) = fleet.entries(ReplicaState.FAILED)
        assert failed.replica_id == first.replica_id
        assert "rank 0 was killed" in failed.reason


async def test_replicas_that_fail_together_count_as_one_failure(
    launcher: FakeLauncher, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(launcher) as fleet:
        for replica in await fleet.serve(3):
            launcher.launched[replica.replica_id].kill("its node was lost")
        await fleet.until(lambda: len(fleet.entries(ReplicaState.FAILED)) == 3)
        delays = [each.getMessage() for each in caplog.records if "the next replica" in each.getMessage()]
        assert delays == ["demo: the next replica starts in 1 s"]


async def test_launch_is_told_of_the_ready_replicas_with_its_weights_alone(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        (first,) = await fleet.serve(1)
        assert launcher.peers == {first.replica_id: ()}
        both = await fleet.serve(2)
        (second,) = {each.replica_id for each in both} - {first.replica_id}
        assert launcher.peers[second] == (first.replica_id,)
        launcher.launched[first.replica_id].kill("rank 0 was killed")
        await fleet.until(lambda: len(launcher.peers) == 3 and len(fleet.ready()) == 2)
        assert list(launcher.peers.values())[-1] == (second,)
        new = deployment(weights_version="2")
        await fleet.fleet.deploy(new)
        await fleet.until_ready(1, new.version)
        assert list(launcher.peers.values())[3] == ()


async def test_failed_launches_are_retried_with_backoff(launcher: FakeLauncher) -> None:
    launcher.problem = ReplicaUnavailable("the weights are not there")
    async with running(launcher) as fleet:
        await fleet.fleet.deploy(deployment(min_replicas=3, max_replicas=3))
        await fleet.until(lambda: len(fleet.entries(ReplicaState.FAILED)) >= 4)
        # Three at once, then one after a second.
        assert len(fleet.entries(ReplicaState.FAILED)) == 4
        (entry,) = fleet.fleet.state().deployments
        assert "the weights are not there" in entry.problem
        launcher.problem = None
        await fleet.fleet.deploy(deployment(min_replicas=3, max_replicas=3, weights_version="2"))
        await fleet.until_ready(3)


async def test_replica_without_room_reports_it(launcher: FakeLauncher) -> None:
    launcher.room = 1
    async with running(launcher) as fleet:
        await fleet.fleet.deploy(deployment(min_replicas=2, max_replicas=2))
        await fleet.until(lambda: len(fleet.ready()) == 1)
        await fleet.until(lambda: any("waits for room: 1 fit" in entry.reason for entry in fleet.entries()))
        await fleet.fleet.deploy(deployment(min_replicas=1, max_replicas=1))
        await fleet.until(lambda: not fleet.entries(ReplicaState.STARTING))
        assert len(fleet.ready()) == 1


async def test_launches_waiting_for_room_block_no_other_calls(launcher: FakeLauncher) -> None:
    launcher.room = 1
    async with running(launcher) as fleet:
        count = MAX_CALLS + 8
        await fleet.fleet.deploy(deployment(min_replicas=count, max_replicas=count))
        await fleet.until(
            lambda: sum("waits for room" in each.reason for each in fleet.entries()) == count - 1
        )
        await fleet.fleet.delete("demo")
        await fleet.until(lambda: len(launcher.removed) == count)
        assert launcher.known() == set()


async def test_launch_canceled_before_placement_leaves_nothing(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        launcher.may_place.clear()
        await fleet.fleet.deploy(deployment())
        await fleet.until(lambda: bool(fleet.entries(ReplicaState.STARTING)))
        await fleet.fleet.delete("demo")
        await fleet.until(lambda: bool(launcher.removed))  # before anything was started
        launcher.may_place.set()
        await fleet.until(lambda: bool(fleet.entries(ReplicaState.STOPPED)))
        assert launcher.launched == {}


async def test_failed_removal_is_retried(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        await fleet.serve()
        launcher.num_failing_removals = 1
        await fleet.fleet.delete("demo")
        await fleet.until(lambda: not launcher.known())
        await fleet.until(lambda: bool(fleet.entries(ReplicaState.STOPPED)))
        assert fleet.store.texts == {}


async def test_concurrent_deletes_succeed_once(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        await fleet.fleet.deploy(deployment())
        first, second = await asyncio.gather(
            fleet.fleet.delete("demo"), fleet.fleet.delete("demo"), return_exceptions=True
        )
        assert first is None
        assert isinstance(second, ModelNotFound)


async def test_waiting_requests_scale_a_model_from_zero(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        await fleet.fleet.deploy(
            deployment(min_replicas=0, max_replicas=2, idle_timeout_s=0.3, down_delay_s=0.0, cooldown_s=0.0)
        )
        for _ in range(2):
            fleet.fleet.report("gateway", {"demo": Demand(1, 10, 1, 10), "unknown": Demand(1)})
            await fleet.until(lambda: bool(fleet.ready()))
            fleet.fleet.report("gateway", {"demo": Demand()})
            await fleet.until(lambda: not launcher.known())
        assert len(launcher.launched) == 2


async def test_changes_are_encoded_once_for_all_gateways(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        await fleet.serve(2)
        first, second = await asyncio.gather(*(fleet.fleet.changes("", DEADLINE_S) for _ in range(2)))
        assert first is second
        assert first is not None
        assert len(pickle.loads(first).replicas) == 2  # noqa: S301


async def test_reason_with_another_number_wakes_gateways_now_and_then(
    launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter(range(100))

    def decide(snapshot: FleetSnapshot, limits: ScalingLimits, state: ScalingState) -> Decision:
        return Decision(0, f"{next(rates)} requests per second", state)

    monkeypatch.setattr("quire.cluster.fleet.controller.fleet.decide", decide)
    now = 0.0
    fleet = Fleet(launcher, MemoryStore(), clock=lambda: now)
    await fleet.deploy(deployment())
    await fleet.step()
    num_woken = 0
    for _ in range(20):
        watching = asyncio.ensure_future(fleet.watch(fleet.state().version, DEADLINE_S))
        await asyncio.sleep(0)
        now += REASON_INTERVAL_S / 10
        before = fleet.state()
        await fleet.step()
        assert fleet.state().deployments != before.deployments
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        num_woken += watching.done()
        watching.cancel()
    assert num_woken in (1, 2)
    await fleet.close()


async def test_replicas_of_two_roles_replace_those_without(launcher: FakeLauncher) -> None:
    launcher.room = 8
    async with running(launcher) as fleet:
        await fleet.serve(2)
        before = {entry.replica_id for entry in fleet.ready()}
        roles = deployment(prefill_replicas=1, decode_replicas=2)
        await fleet.fleet.deploy(roles)
        fewest = 2

        def replaced() -> bool:
            nonlocal fewest
            ready = {entry.replica_id for entry in fleet.ready()}
            fewest = min(fewest, len(ready))
            return len(ready) == 3 and not ready & before

        await fleet.until(replaced)
        assert fewest == 2, "requests had fewer replicas meanwhile"
        versions = [entry.version for entry in fleet.ready()]
        prefill, decode = (part.version for part in roles.parts)
        assert sorted(versions) == sorted([prefill, decode, decode])
        (entry,) = fleet.fleet.state().deployments
        assert entry.target == 3
        assert entry.reason.startswith("1 prefill: ")
        with pytest.raises(InvalidRequest, match="whose replicas have roles"):
            await fleet.fleet.set_scale("demo", 1, 4)
        await fleet.fleet.deploy(deployment(min_replicas=1, max_replicas=1))
        await fleet.until(lambda: len(fleet.ready()) == 1)


def test_demand_is_divided_by_role() -> None:
    demand = Demand(5, 1000, 2, 300, num_prefill_tokens=800)
    assert demand.of_role("both") == demand.of_role("decode") == Demand(5, 200, 2, 300)
    assert demand.of_role("prefill") == Demand(1, 800)
    assert Demand(0, 10, num_prefill_tokens=50).of_role("decode").num_tokens == 0
