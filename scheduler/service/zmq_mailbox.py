"""ZmqMailbox: a mailbox for gateways in other processes, over ZeroMQ."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import zmq

from ...proto import stream
from ...proto.errors import ProtocolError
from ...proto.stream import GatewayMessage, ReplicaMessage
from ...proto.transport.network import CurveGuard, CurveKeys, bind

# Batches queued for a gateway that does not read; a gateway with more is considered dead.
MAX_UNREAD_MESSAGES = 10_000
MAX_MESSAGE_BYTES = 64 << 20
# Messages received between two steps: bounds the delay of running sequences under a flood of messages.
MAX_MESSAGES_AT_ONCE = 1000

_log = logging.getLogger(__name__)


class ZmqMailbox:
    """Mailbox on a ROUTER socket, which knows each gateway's DEALER by its routing id.

    Args:
        endpoint: where to bind: ``ipc://PATH`` in a directory that only its owner may enter, or tcp, where the
            system may choose the port.
        keys: keys that gateways must have, over tcp.

    Attributes:
        endpoint: bound endpoint, for gateways.
    """

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        self.endpoint = endpoint
        # Waking during close() would block context termination.
        self._closing = threading.Lock()
        self._context = zmq.Context()
        # The latest message and its frame: a status that many gateways get is encoded once.
        self._encoded: tuple[ReplicaMessage | None, bytes] = None, b""
        self._guard = None if keys is None else CurveGuard(self._context, keys)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self.endpoint = bind(self._router, endpoint, keys)
        except zmq.ZMQError:
            self.close()
            raise
        # Sockets belong to the loop's thread; another thread wakes it through a socket of its own.
        self._bell = self._context.socket(zmq.PULL)
        self._bell.bind("inproc://bell")
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        messages: list[tuple[bytes, GatewayMessage]] = []
        ready = dict(self._poller.poll(round(timeout_s * 1000)))
        if self._bell in ready:
            self._bell.recv()
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if not self._router.poll(0):
                break
            gateway, *frames = self._router.recv_multipart()
            frame = frames[-1] if frames else b""
            try:
                message = stream.decode(frame)
            except ProtocolError as error:
                _log.warning("ignored a message of gateway %s: %s", gateway.hex(), error)
                if (refusal := stream.refusal_of(frame)) is not None:
                    self.send(gateway, refusal)
                continue
            if isinstance(message, GatewayMessage):
                messages.append((bytes(gateway), message))
        return messages

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        if message is not self._encoded[0]:
            self._encoded = message, stream.encode(message)
        try:
            self._router.send_multipart((gateway, self._encoded[1]), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def wake(self) -> None:
        with self._closing:
            if self._context.closed:
                return
            with self._context.socket(zmq.PUSH) as ringer:
                ringer.connect("inproc://bell")
                ringer.send(b"")

    def close(self) -> None:
        """Send what is queued, for at most a second, and close. Safe to call twice."""
        with self._closing:
            if self._guard is not None:
                self._guard.close()
            self._context.destroy(linger=1000)
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
