"""Drains of replicas and nodes, and preempted nodes, in a fleet without Ray."""

from __future__ import annotations

import pytest
from fake_fleet import FakeLauncher
from running_fleet import DEADLINE_S, running

from quire.cluster.gateway.routing.controller_sync import fleet_state_to_message
from quire.proto import admin_pb2
from quire.proto.errors import InvalidRequest


async def test_drained_replicas_and_nodes_are_replaced(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        first, second = await fleet.serve(2)
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


async def test_drain_that_has_not_begun_is_taken_back(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        (first,) = await fleet.serve()
        with pytest.raises(InvalidRequest, match="waits for no other replica"):
            fleet.fleet.undrain(first.replica_id)
        before = fleet.fleet.state().version
        launcher.may_place.clear()  # the drain begins once another replica is ready
        await fleet.fleet.drain(first.replica_id)
        state = await fleet.fleet.watch(before, DEADLINE_S)  # gateways learn of it at once
        assert state is not None
        (shown,) = fleet_state_to_message(state, "").replicas
        assert shown.state == admin_pb2.REPLICA_STATE_DRAINING
        assert shown.problem == "an operator drains it; it gets requests until another replica is ready"
        assert first.record is not None
        with pytest.raises(InvalidRequest, match="Ray does not take back"):
            fleet.fleet.undrain(first.record.node_ids[0])
        assert fleet.fleet.undrain(first.replica_id[:-1]) == first.replica_id
        assert not any(entry.drain_reason for entry in fleet.entries())
        await fleet.fleet.step()
        assert [entry.replica_id for entry in fleet.ready()] == [first.replica_id]
        launcher.may_place.set()
        await fleet.fleet.drain(first.replica_id)
        await fleet.until(lambda: first.replica_id not in launcher.known())
        await fleet.until_ready(1)


async def test_replica_on_a_node_drained_by_ray_is_replaced(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        first, _ = await fleet.serve(2)
        assert first.record is not None
        launcher.draining[first.record.node_ids[0]] = 0.0
        await fleet.until(lambda: first.replica_id not in launcher.known())
        await fleet.until_ready(2)


async def test_replica_on_a_preempted_node_is_replaced(launcher: FakeLauncher) -> None:
    async with running(launcher) as fleet:
        (first,) = await fleet.serve()
        assert first.record is not None
        await fleet.until(lambda: bool(launcher.notices))
        launcher.notices[first.record.node_ids[0]].set_result(0.3)
        await fleet.until(lambda: first.replica_id not in launcher.known())
        await fleet.until_ready(1)
        entry = next(entry for entry in fleet.entries() if entry.replica_id == first.replica_id)
        assert entry.reason == "the cloud takes node node-0 back"
