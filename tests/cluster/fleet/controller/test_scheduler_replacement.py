"""A fleet replaces the scheduler of a replica, which stays ready, if the replica's ranks have not failed."""

from __future__ import annotations

from fake_fleet import FakeLauncher
from running_fleet import RunningFleet, running

from quire.cluster.fleet.controller.fleet_state import ReplicaState
from quire.cluster.fleet.replica.supervised_replica import MAX_REPLACEMENTS
from quire.proto.errors import RankFailed, ReplicaUnavailable


async def until_replaced(fleet: RunningFleet, replica_id: str, number: int) -> None:
    def is_replaced() -> bool:
        records = {entry.replica_id: entry.record for entry in fleet.ready()}
        record = records.get(replica_id)
        return record is not None and record.endpoint.endswith(f"{replica_id}.{number}")

    await fleet.until(is_replaced)


async def test_replica_keeps_its_name_and_place_with_another_scheduler(launcher: FakeLauncher) -> None:
    launcher.replaces_schedulers = True
    async with running(launcher) as fleet:
        (before,) = await fleet.serve()
        launcher.launched[before.replica_id].kill("its process died")
        await until_replaced(fleet, before.replica_id, 2)
        launcher.launched[before.replica_id].kill("its process died again")
        await until_replaced(fleet, before.replica_id, 3)
        assert launcher.removed == []
        assert list(launcher.launched) == [before.replica_id]
        (text,) = (text for name, text in fleet.store.texts.items() if name.startswith("replica/"))
        assert f"{before.replica_id}.3" in text  # a restarted controller finds the new scheduler
        # The replacement drains and ends as any replica does.
        await fleet.fleet.drain(before.replica_id)
        await fleet.until(lambda: before.replica_id in launcher.removed)


async def test_replica_whose_ranks_failed_is_replaced_as_a_whole(launcher: FakeLauncher) -> None:
    launcher.replaces_schedulers = True
    async with running(launcher) as fleet:
        (before,) = await fleet.serve()
        launcher.launched[before.replica_id].group.error = RankFailed(0, "its GPU fell off")
        await fleet.until(lambda: before.replica_id in launcher.removed)
        await fleet.until_ready(1)
        assert fleet.ready()[0].replica_id != before.replica_id


async def test_replica_fails_if_its_scheduler_cannot_be_replaced(launcher: FakeLauncher) -> None:
    launcher.replaces_schedulers = True
    async with running(launcher) as fleet:
        (before,) = await fleet.serve()
        launcher.problem = ReplicaUnavailable("no rank answers")
        launcher.launched[before.replica_id].kill("its process died")
        await fleet.until(lambda: bool(fleet.entries(ReplicaState.FAILED)))
        reason = fleet.entries(ReplicaState.FAILED)[0].reason
        assert "its process died; it could not be replaced: no rank answers" in reason
        launcher.problem = None
        await fleet.until(lambda: before.replica_id in launcher.removed)


async def test_replica_whose_scheduler_fails_too_often_is_given_up(launcher: FakeLauncher) -> None:
    launcher.replaces_schedulers = True
    async with running(launcher) as fleet:
        (before,) = await fleet.serve()
        for number in range(2, MAX_REPLACEMENTS + 2):
            launcher.launched[before.replica_id].kill("its process died")
            await until_replaced(fleet, before.replica_id, number)
        launcher.launched[before.replica_id].kill("its process died")
        await fleet.until(lambda: before.replica_id in launcher.removed)
