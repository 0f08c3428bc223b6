"""GatewayRegistry: the gateways that follow the controller. Pure: the clock is passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A gateway that has not asked for so long is gone. While the controller is away, gateways ask it every 5 s.
GONE_AFTER_S = 10.0


class GatewayRegistry:
    """Gateways by id, of which each knows the others so that they divide the replicas.

    Until every gateway has had time to ask, none is named: a few of them would take over the replicas of all.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = clock()
        self._asking: Counter[str] = Counter()  # gateway_id |-> its calls that wait for changes
        self._asked_at: dict[str, float] = {}  # gateway_id |-> the end of its latest call, or its beginning
        self._ids: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the gateways as of the last `update`; empty until they are known."""
        return self._ids

    @contextmanager
    def following(self, gateway_id: str) -> Iterator[None]:
        """Count the gateway while it waits for changes, and for GONE_AFTER_S afterwards."""
        self._asking[gateway_id] += 1
        self._asked_at[gateway_id] = self._clock()
        try:
            yield
        finally:
            self._asking[gateway_id] -= 1
            self._asked_at[gateway_id] = self._clock()

    def update(self) -> bool:
        """Forget those that are gone; return whether `ids` has changed."""
        now = self._clock()
        for gateway_id, asked_at in list(self._asked_at.items()):
            if not self._asking[gateway_id] and now - asked_at > GONE_AFTER_S:
                del self._asked_at[gateway_id], self._asking[gateway_id]
        before, self._ids = self._ids, tuple(sorted(self._asked_at))
        if now - self._began_at < GONE_AFTER_S:
            self._ids = ()
        return self._ids != before
