"""An event loop on simulated time: it never waits, but moves its clock to the next timer."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import secrets
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from quire.cluster.gateway.routing.request_migration import MigratingRequest, ignore_move
from quire.cluster.simulation.replica import SimulatedClock

T = TypeVar("T")

# Unix time at the start, for the fleet's wall clock.
START = 1_700_000_000.0


class _Selector(selectors.SelectSelector):
    """Moves the clock instead of waiting for sockets."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits, and no timer is left"
        self._clock.now += max(0.0, timeout)
        return []


class SimulatedEventLoop(asyncio.SelectorEventLoop):
    """See the module. Nothing in it may use a thread or a socket."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__(_Selector(clock))
        self._clock_resolution = 1e-6
        self._simulated_clock = clock

    def time(self) -> float:
        return self._simulated_clock.now

    def _write_to_self(self) -> None:
        """Override: the loop never sleeps, so nothing has to wake it."""


async def _call_inline(function: Callable[..., T], /, *arguments: object) -> T:
    return function(*arguments)


@contextmanager
def _simulated_world(clock: SimulatedClock, rng: random.Random) -> Iterator[None]:
    """Replace the clocks, the threads and the sources of randomness of this process.

    The garbage collector is off: the place where it closes something depends on the rest of the process.
    """
    make_random, state_before = random.Random, random.getstate()

    def seeded(*seed: Any) -> random.Random:
        return make_random(*(seed or (rng.getrandbits(64),)))

    with ExitStack() as patches:
        for target, name, value in (
            (time, "monotonic", clock),
            (time, "time", lambda: START + clock.now),
            (secrets, "token_hex", lambda length: f"{rng.getrandbits(8 * length):0{2 * length}x}"),
            (os, "urandom", rng.randbytes),
            (random, "Random", seeded),
            (asyncio, "to_thread", _call_inline),
            # Its default was bound to the real clock when it was imported.
            (MigratingRequest.__init__, "__defaults__", (clock, ignore_move)),
        ):
            patches.enter_context(patch.object(target, name, value))
        patches.callback(random.setstate, state_before)
        random.seed(rng.getrandbits(64))  # of the module's own functions
        patches.callback(gc.enable)
        gc.disable()
        yield


def run_simulated(
    make_main: Callable[[SimulatedClock, random.Random], Coroutine[Any, Any, T]], seed: int
) -> T:
    """Run a coroutine to its end in simulated time; equal seeds give equal runs."""
    clock, rng = SimulatedClock(), random.Random(seed)
    with _simulated_world(clock, random.Random(seed + 1)):
        loop = SimulatedEventLoop(clock)
        try:
            return loop.run_until_complete(make_main(clock, rng))
        finally:
            _cancel_all(loop)
            loop.close()


def _cancel_all(loop: SimulatedEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=100.0))
