"""EventSink: the step loop's way to publish the changes of prefix caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..kv.cache_events import CacheEvent


class EventSink(Protocol):
    """Receiver of the events of each step."""

    def publish(self, events: Sequence[CacheEvent], timestamp: float) -> None:
        """Send events, without waiting. `timestamp` is in seconds since 1970."""
        ...

    def close(self) -> None: ...


class NoSink:
    """Receiver of no events."""

    def publish(self, events: Sequence[CacheEvent], timestamp: float) -> None:
        pass

    def close(self) -> None:
        pass
