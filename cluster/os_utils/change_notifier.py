"""ChangeNotifier: an asyncio condition without a lock, for state that one event loop owns."""

from __future__ import annotations

import asyncio


class ChangeNotifier:
    """Wakes every waiter on each change. For one event loop.

    A waiter checks its condition and then awaits `wait`, with no other await in between: so no change is missed.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake everything that waits now; later waiters wait for the next change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self) -> None:
        """Return at the next change."""
        await self._changed.wait()
