"""watch_stalls, shortest_stall: the longest stall of an event loop.

Its unit depends on neither the load nor the machine.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Stalls:
    """Stalls of an event loop.

    Attributes:
        longest: the most processor time of this process between two turns of the loop, in units of what a loop of
            100,000 rounds in Python takes.
    """

    longest: float = 0.0


@asynccontextmanager
async def watch_stalls() -> AsyncIterator[Stalls]:
    """Let the event loop turn all the time, and measure each turn. Other threads of the process count as well.

    The garbage collector skips what existed before: a pass over what all earlier tests left is a stall of its own.
    """
    stalls, loop, unit_s = Stalls(), asyncio.get_running_loop(), _unit_s()
    is_watching, last = True, time.process_time()

    def turn() -> None:
        nonlocal last
        now = time.process_time()
        stalls.longest = max(stalls.longest, (now - last) / unit_s)
        last = now
        if is_watching:
            loop.call_soon(turn)

    gc.freeze()
    loop.call_soon(turn)
    try:
        yield stalls
    finally:
        is_watching = False
        gc.unfreeze()


async def shortest_stall(work: Callable[[], Awaitable[object]], limit: float, *, max_tries: int = 5) -> float:
    """Await the work until it stalls the loop for at most `limit`, and return the shortest of the longest stalls.

    A stall that the work causes comes back in each try; other threads' work and cold caches do not.
    """
    shortest = math.inf
    for _ in range(max_tries):
        async with watch_stalls() as stalls:
            await work()
        shortest = min(shortest, stalls.longest)
        if shortest <= limit:
            break
    return shortest


def _unit_s() -> float:
    return min(_rounds_s() for _ in range(5))


def _rounds_s() -> float:
    before = time.process_time()
    for _ in range(100_000):
        pass
    return time.process_time() - before
