"""Parts of fleets that are simulated in one process: the frames of connections, and the store of controllers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping


class ReceivedFrames:
    """The receiving half of a `cluster.fleet.replica.connection.Connection`, whose frames are put in by `_arrive`."""

    def __init__(self) -> None:
        self._received: deque[bytes] = deque()
        self._arrival = asyncio.Event()

    def _arrive(self, frame: bytes) -> None:
        self._received.append(frame)
        self._arrival.set()

    async def receive(self) -> bytes:
        """See `Connection`."""
        while not self._received:
            self._arrival.clear()
            await self._arrival.wait()
        return self._received.popleft()

    def receive_arrived(self) -> bytes | None:
        """See `Connection`."""
        return self._received.popleft() if self._received else None


class MemoryStore:
    """See `interfaces.Store`.

    Attributes:
        texts: name |-> text. A controller that comes later may be given those of an earlier one.
    """

    def __init__(self, texts: dict[str, str] | None = None) -> None:
        self.texts = {} if texts is None else texts

    def read(self) -> Mapping[str, str]:
        return dict(self.texts)

    def write(self, name: str, text: str) -> None:
        self.texts[name] = text

    def delete(self, name: str) -> None:
        self.texts.pop(name, None)
