"""Calls of the fleet's controller, with a stand-in for its actor, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import pytest

from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.controller.controller_client import ControllerClient
from quire.cluster.fleet.controller.fleet_state import Delete, Deploy
from quire.proto.errors import ReplicaUnavailable
from tests.simulation.event_loop import Clock, run_simulated


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

    async def main(clock: Clock, rng: Random) -> float:
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
