"""InProcessConnection: a ReplicaClient's connection to a step loop in the same process."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ...proto.stream import GatewayMessage, ReplicaMessage, decode, encode
from ...scheduler import InMemoryMailbox

_GATEWAY = b"in-process"


class InProcessConnection:
    """Frames to and from the mailbox of a step loop on another thread. Implements `Connection`.

    Messages are encoded, so that the two threads share no object that one of them changes.
    """

    def __init__(self, mailbox: InMemoryMailbox) -> None:
        self._mailbox = mailbox
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._mailbox.connect(_GATEWAY, self._on_message)

    def send(self, frame: bytes) -> None:
        message = decode(frame)
        assert isinstance(message, GatewayMessage), "a client sends messages of a gateway"
        self._mailbox.post(_GATEWAY, message)

    async def receive(self) -> bytes:
        return await self._frames.get()

    def receive_arrived(self) -> bytes | None:
        return None if self._frames.empty() else self._frames.get_nowait()

    async def wait_until_lost(self) -> None:
        await asyncio.Event().wait()  # it is never lost

    async def close(self, linger_ms: int) -> None:
        """Messages that arrive later are dropped."""

    def _on_message(self, message: ReplicaMessage) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._frames.put_nowait, encode(message))
