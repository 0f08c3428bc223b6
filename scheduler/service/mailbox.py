"""Mailbox: where gateways' messages come in and news goes out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import zmq

from ...proto import stream
from ...proto.errors import ProtocolError
from ...proto.stream import GatewayMessage, ReplicaMessage
from ...proto.transport.network import CurveGuard, CurveKeys, bind
from ...proto.transport.wakeup import Wakeup

# Batches that may wait for a gateway that does not read; past them it is taken for dead.
MAX_UNREAD_MESSAGES = 10_000
MAX_MESSAGE_BYTES = 64 << 20
# Taken in between two steps: however fast messages come, the sequences that run get on.
MAX_MESSAGES_AT_ONCE = 1000

_log = logging.getLogger(__name__)


class Mailbox(Protocol):
    """The loop's end of the line to all gateways."""

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        """What has come, as (gateway, message); waits for the first for up to `timeout_s`."""
        ...

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        """Never blocks; False when the gateway is gone or has stopped reading."""
        ...

    def wake(self) -> None:
        """Ends a `receive` that waits, from any thread; no-op when closed."""
        ...


class ZmqMailbox:
    """A ROUTER socket; each gateway's DEALER is known by its routing id.

    Args:
        endpoint: where to bind: ``ipc://PATH`` in a directory that only its owner may enter, or tcp, where the
            port may be left to the system.
        keys: that gateways must have, over tcp.

    Attributes:
        endpoint: where it is bound, for gateways.
    """

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._guard = None if keys is None else CurveGuard(self._context, keys)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._wakeup = Wakeup(self._context)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wakeup.socket, zmq.POLLIN)
        try:
            self.endpoint = bind(self._router, endpoint, keys)
        except zmq.ZMQError:
            self.close()
            raise

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        messages: list[tuple[bytes, GatewayMessage]] = []
        ready = dict(self._poller.poll(round(timeout_s * 1000)))
        if self._wakeup.socket in ready:
            self._wakeup.clear()
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if not self._router.poll(0):
                break
            gateway, *frames = self._router.recv_multipart()
            try:
                message = stream.decode(frames[-1] if frames else b"")
            except ProtocolError as error:
                _log.warning("a message of gateway %s was ignored: %s", gateway.hex(), error)
                continue
            if isinstance(message, GatewayMessage):
                messages.append((bytes(gateway), message))
        return messages

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        try:
            self._router.send_multipart((gateway, stream.encode(message)), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def wake(self) -> None:
        self._wakeup.wake()

    def close(self) -> None:
        """Sends what is left, for at most a second, and closes. Safe to call twice."""
        self._wakeup.close()
        if self._guard is not None:
            self._guard.close()
        self._context.destroy(linger=1000)
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
