"""ChangeNotifier: which waiters a change wakes."""

from __future__ import annotations

import asyncio

from quire.cluster.os_utils.event_loop import ChangeNotifier

DEADLINE_S = 60.0


async def test_notify_wakes_every_waiter() -> None:
    notifier = ChangeNotifier()
    waiters = [asyncio.create_task(notifier.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    notifier.notify()
    await asyncio.wait_for(asyncio.gather(*waiters), DEADLINE_S)


async def test_wait_ignores_earlier_changes() -> None:
    notifier = ChangeNotifier()
    notifier.notify()
    waiter = asyncio.create_task(notifier.wait())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiter.done()
    notifier.notify()
    await asyncio.wait_for(waiter, DEADLINE_S)


async def test_no_change_is_missed_between_check_and_wait() -> None:
    """Two changes before the waiter runs again wake it once, and it sees the latest state."""
    notifier, values, seen = ChangeNotifier(), [0], []

    async def follow() -> None:
        while values[-1] < 4:
            await notifier.wait()
            seen.append(values[-1])

    follower = asyncio.create_task(follow())
    await asyncio.sleep(0)
    for pair in ((1, 2), (3, 4)):
        for value in pair:
            values.append(value)
            notifier.notify()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.wait_for(follower, DEADLINE_S)
    assert seen == [2, 4]
