"""Work for all connections, in turns of the event loop."""

from __future__ import annotations

import asyncio
from functools import partial

from quire.cluster.gateway.http.connection import MAX_PER_TURN, PacedWork


async def test_work_runs_in_order_and_a_few_parts_in_each_turn() -> None:
    done: list[int] = []
    paced = PacedWork()
    for number in range(2 * MAX_PER_TURN + 1):
        paced.run(partial(done.append, number))
    counts = [len(done)]
    while len(done) <= 2 * MAX_PER_TURN:
        await asyncio.sleep(0)
        counts.append(len(done))
    assert done == list(range(2 * MAX_PER_TURN + 1))
    assert counts == [MAX_PER_TURN, 2 * MAX_PER_TURN, 2 * MAX_PER_TURN + 1]
    await asyncio.sleep(0)
    paced.run(lambda: done.append(-1))
    assert done[-1] == -1  # at once, in a turn of its own


async def test_work_that_fails_does_not_hold_up_the_rest() -> None:
    done = asyncio.Event()
    paced = PacedWork()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    for _ in range(MAX_PER_TURN):
        paced.run(lambda: None)
    paced.run(_fail)
    paced.run(done.set)
    await done.wait()


def _fail() -> None:
    raise RuntimeError("planted")
