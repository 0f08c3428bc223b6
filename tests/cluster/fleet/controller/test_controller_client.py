"""Calls of the fleet's controller, with a stand-in for its actor, in simulated time."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.controller.controller_client import ControllerClient
from quire.cluster.fleet.controller.fleet_state import (
    ChangeLog,
    Delete,
    Deploy,
    FleetState,
    NodeEntry,
    ReplicaEntry,
    ReplicaState,
)
from quire.cluster.simulation.replica import SimulatedClock
from quire.proto.errors import ReplicaUnavailable
from tests.simulation.event_loop import run_simulated


@dataclass
class SlowMethod:
    """A method of an actor that takes a time."""

    delay_s: float

    def remote(self, *arguments: object) -> Awaitable[None]:
        return asyncio.sleep(self.delay_s)


@dataclass
class SlowActor:
    """An actor all of whose calls take the same time."""

    delay_s: float

    def __getattr__(self, name: str) -> SlowMethod:
        return SlowMethod(self.delay_s)


def call(delay_s: float, method: Callable[[ControllerClient], Awaitable[object]]) -> float:
    """Call a slow controller; return the simulated time that it took."""

    async def main(clock: SimulatedClock, rng: Random) -> float:
        await method(ControllerClient(cast(Any, SlowActor(delay_s))))
        return clock.now

    return run_simulated(main, seed=0)


def test_deployment_may_take_minutes() -> None:
    """The controller checks the model's files, which may be on a slow disk."""
    deployment = Deployment.from_table({"model": "demo"})
    assert call(300.0, lambda controller: controller.apply(Deploy(deployment))) == pytest.approx(300.0)


def test_other_calls_name_the_controller_that_does_not_answer() -> None:
    with pytest.raises(ReplicaUnavailable, match="did not answer 'delete' in 30 s"):
        call(300.0, lambda controller: controller.apply(Delete("demo")))


class Actor:
    """A controller's actor with a state that tests change.

    Attributes:
        sent: bytes of each answer to a call for changes.
    """

    def __init__(self, epoch: str = "e") -> None:
        self.epoch, self.number, self.log, self.sent = epoch, 0, ChangeLog(), list[int]()
        self.replicas = {f"replica-{number}": entry(number) for number in range(200)}
        self.changes = self
        self.set()

    @property
    def state(self) -> FleetState:
        return FleetState(
            f"{self.epoch}-{self.number}", (), tuple(self.replicas.values()), (NodeEntry("node", "host"),)
        )

    def set(self, *changed: ReplicaEntry, removed: str = "") -> None:
        self.replicas |= {each.replica_id: each for each in changed}
        self.replicas.pop(removed, None)
        self.number += 1
        self.log.update(self.number, self.state)

    async def remote(self, since: str, timeout_s: float) -> bytes:
        epoch, _, number = since.partition("-")
        encoded = pickle.dumps(self.log.since(int(number) if epoch == self.epoch else 0, since))
        self.sent.append(len(encoded))
        return encoded


def entry(number: int, reason: str = "") -> ReplicaEntry:
    return ReplicaEntry(f"replica-{number}", "demo", "1", ReplicaState.READY, reason)


async def test_only_what_changed_is_sent() -> None:
    actor = Actor()
    client = ControllerClient(cast(Any, actor))
    state = await client.watch("gateway", "", 1.0)
    assert state == actor.state
    for changed, removed in (
        (entry(3, "slow"), ""),
        (entry(200), "replica-7"),
        (entry(7), "replica-200"),
    ):
        actor.set(changed, removed=removed)
        state = await client.watch("gateway", state.version, 1.0)
        assert state == actor.state
    whole, *changes = actor.sent
    assert max(changes) < whole / 20


async def test_whole_state_is_sent_to_who_knows_another() -> None:
    """A gateway that could not apply the last state, or has that of another controller."""
    actor = Actor()
    client = ControllerClient(cast(Any, actor))
    first = await client.watch("gateway", "", 1.0)
    assert first is not None
    actor.set(entry(3, "slow"))
    assert await client.watch("gateway", first.version, 1.0) == actor.state
    actor.set(entry(4, "slow"))
    assert await client.watch("gateway", first.version, 1.0) == actor.state
    handle = SimpleNamespace(changes=Actor("other"))
    client = ControllerClient(cast(Any, handle))
    of_other = await client.watch("gateway", "", 1.0)
    assert of_other is not None
    handle.changes = actor
    assert await client.watch("gateway", of_other.version, 1.0) == actor.state


def test_removals_that_are_forgotten_are_told_by_a_whole_state() -> None:
    log, states = ChangeLog(max_removed=2), list[FleetState]()
    for number in range(1, 7):
        states.append(FleetState(f"e-{number}", (), tuple(entry(each) for each in range(number, 9))))
        log.update(number, states[-1])
    for number, known in enumerate(states[:-1], start=1):
        changes = log.since(number, known.version)
        assert changes.applied_to(known) == states[-1]
        assert bool(changes.since) == (number >= 4)


def test_controller_of_an_earlier_release_is_asked_for_its_whole_state() -> None:
    actor = Actor()

    class Earlier:
        """An actor without the call for changes."""

        class watch:
            @staticmethod
            async def remote(since: str, timeout_s: float) -> FleetState:
                return actor.state

    client = ControllerClient(cast(Any, Earlier()))
    assert asyncio.run(client.watch("gateway", "", 1.0)) == actor.state
