"""Messages and decisions of a fleet in which nothing changes, counted in simulated time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from benchmarks.large_fleet import CALM_S, CountingLoop, World, simulated_time
from quire.cluster.fleet.controller import fleet as fleet_module
from quire.cluster.fleet.controller.autoscaler import decide
from quire.cluster.fleet.controller.fleet import REST_S, TICK_S
from quire.cluster.fleet.replica.client import QUIET_LOAD_HEARTBEATS
from quire.cluster.gateway.routing.controller_sync import WATCH_TIMEOUT_S

NUM_REPLICAS, NUM_GATEWAYS = 8, 4
IDLE_S = 4 * WATCH_TIMEOUT_S


@pytest.fixture
def loop() -> Iterator[CountingLoop]:
    random.seed(0)  # of the gateways' patience
    made = CountingLoop()
    with simulated_time(made):
        yield made
        for task in asyncio.all_tasks(made):
            task.cancel()
        made.run_until_complete(asyncio.sleep(0))
        made.close()


class Calls:
    """Counts the calls of a function."""

    def __init__(self, function: Any) -> None:
        self.count, self._function = 0, function

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        return self._function(*arguments)


def run_idle(loop: CountingLoop, then: Callable[[World], Awaitable[None]]) -> None:
    """Run a fleet that has no requests until it has calmed down, and then the coroutine that `then` makes of it."""
    world = World(loop, NUM_REPLICAS, NUM_GATEWAYS)

    async def run() -> None:
        await world.start()
        await asyncio.sleep(CALM_S)
        await then(world)

    loop.run_until_complete(run())


def test_idle_fleet_costs_the_controller_heartbeats_alone(loop: CountingLoop) -> None:
    """Each replica is asked and answers, and each gateway asks anew for changes, in half a minute."""
    counts: list[int] = []

    async def rest(world: World) -> None:
        version, before = world.fleet.state().version, world.num_messages["controller"]
        await asyncio.sleep(IDLE_S)
        counts.append(world.num_messages["controller"] - before)
        assert world.fleet.state().version == version

    run_idle(loop, rest)
    beats = NUM_REPLICAS * IDLE_S / QUIET_LOAD_HEARTBEATS + NUM_GATEWAYS * IDLE_S / WATCH_TIMEOUT_S
    assert 0 < counts[0] <= 2 * (beats + NUM_REPLICAS + NUM_GATEWAYS)


def test_idle_fleet_decides_rarely_and_at_once_on_a_request(
    loop: CountingLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = Calls(decide)
    monkeypatch.setattr(fleet_module, "decide", decisions)

    async def rest(world: World) -> None:
        before = decisions.count
        await asyncio.sleep(IDLE_S)
        assert decisions.count - before <= IDLE_S / REST_S + 1
        before = decisions.count
        await world.send_requests(3.0)
        await asyncio.sleep(2 * TICK_S)
        assert world.outcomes["complete"] == world.outcomes.total() > 0
        assert decisions.count - before >= 2

    run_idle(loop, rest)


def test_controller_learns_of_load_each_second(loop: CountingLoop) -> None:
    """Its statuses are as fresh under load as a gateway's."""

    async def load(world: World) -> None:
        await world.send_requests(10.0)
        await asyncio.sleep(2 * TICK_S)
        statuses = [replica.status for replica in world.fleet._replicas.values()]
        assert (
            sum(0 if each is None else each.num_finished for each in statuses) >= world.outcomes.total() > 0
        )

    run_idle(loop, load)
