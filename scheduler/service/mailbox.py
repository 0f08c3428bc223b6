"""Mailbox: the step loop's connection to its gateways; InMemoryMailbox connects gateways of the same process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ...proto.stream import GatewayMessage, ReplicaMessage


class Mailbox(Protocol):
    """The step loop's connection to all gateways."""

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        """Return the messages that have arrived, as (gateway, message); wait up to `timeout_s` for the first."""
        ...

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        """Send without blocking. Returns False if the gateway is gone or has stopped reading."""
        ...

    def wake(self) -> None:
        """End a waiting `receive`, from any thread. Does nothing once the mailbox is closed."""
        ...


class InMemoryMailbox:
    """Mailbox for gateways in the same process.

    Messages to a gateway are passed to its callback on the thread of the step loop, which waits meanwhile.
    """

    def __init__(self) -> None:
        self._receivers: dict[bytes, Callable[[ReplicaMessage], None]] = {}  # gateway |-> its callback
        self._messages: deque[tuple[bytes, GatewayMessage]] = deque()
        self._arrival = threading.Event()

    def connect(self, gateway: bytes, on_message: Callable[[ReplicaMessage], None]) -> None:
        """Register a gateway and the callback for messages to it."""
        self._receivers[gateway] = on_message

    def post(self, gateway: bytes, message: GatewayMessage) -> None:
        """Send a message to the step loop, from any thread."""
        self._messages.append((gateway, message))
        self._arrival.set()

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        if timeout_s > 0:
            self._arrival.wait(timeout_s)
        self._arrival.clear()
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        receiver = self._receivers.get(gateway)
        if receiver is None:
            return False
        receiver(message)
        return True

    def wake(self) -> None:
        self._arrival.set()
