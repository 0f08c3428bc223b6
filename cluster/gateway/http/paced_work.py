"""PacedWork: the work for all connections in small parts, between which streams advance."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# Parts of work in one turn of the event loop. Each parses 16 kB at most, and starts or wakes one request at most,
# whose endpoint may take a millisecond. 8,000 requests that arrived together held up all streams for 9.5 s.
MAX_PER_TURN = 8


class PacedWork:
    """Runs work at once while the turn of the event loop has room for it, and otherwise in later turns.

    Work runs in the order in which it came. For one event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_left = MAX_PER_TURN
        self._is_turn_counted = False

    def run(self, work: Callable[[], None]) -> None:
        """Run the work now or soon."""
        self._waiting.append(work)
        self._count_turn()
        self._run_waiting()

    def _count_turn(self) -> None:
        if not self._is_turn_counted:
            self._is_turn_counted = True
            asyncio.get_running_loop().call_soon(self._on_next_turn)

    def _on_next_turn(self) -> None:
        self._is_turn_counted = False
        self._num_left = MAX_PER_TURN
        if self._waiting:
            self._count_turn()
            self._run_waiting()

    def _run_waiting(self) -> None:
        while self._waiting and self._num_left:
            self._num_left -= 1
            self._waiting.popleft()()
