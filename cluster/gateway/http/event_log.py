"""EventLog: the server-sent events of one response, for readers that come and go."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from ....proto.errors import RequestNotFound
from ...os_utils.change_notifier import ChangeNotifier

# A delta of one token has some 200 bytes.
MAX_BYTES = 8 << 20


class EventLog:
    """Events by their sequence numbers, from 0 on. For one event loop.

    Attributes:
        num_bytes: of the events that are kept.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._is_dropped = self._has_ended = False
        self._changes = ChangeNotifier()

    def add(self, chunk: str) -> None:
        """Add whole events. If they are too many, all are dropped."""
        events = [f"{event}\n\n".encode() for event in chunk.split("\n\n") if event]
        self.num_bytes += sum(map(len, events))
        self._events += events
        if self._is_dropped or self.num_bytes > self._max_bytes:
            self._is_dropped = True
            self._events.clear()
            self.num_bytes = 0
        self._changes.notify()

    def end(self) -> None:
        """Let readers end after the last event."""
        self._has_ended = True
        self._changes.notify()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events after this sequence number, those of a running response as they are made.

        Raises:
            RequestNotFound: the events were too many to be kept.
        """
        position = after + 1
        while True:
            if self._is_dropped:
                raise RequestNotFound(
                    f"the response has more than {self._max_bytes} bytes of events; fetch it whole"
                )
            if events := self._events[position:]:
                position += len(events)
                yield b"".join(events)
            elif self._has_ended:
                return
            else:
                await self._changes.wait()
