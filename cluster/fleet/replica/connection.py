"""Connection: a ReplicaClient's connection to its scheduler, over ZeroMQ or simulated by tests."""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from ....proto.transport.network import CurveKeys, connect


class Connection(Protocol):
    """Frames to and from one scheduler, in order. A connection that is lost is made again, without what was sent."""

    def open(self) -> None:
        """Begin to connect; returns at once."""
        ...

    def send(self, frame: bytes) -> None:
        """Send without blocking."""
        ...

    async def receive(self) -> bytes:
        """Return the next frame."""
        ...

    def receive_arrived(self) -> bytes | None:
        """Return the next frame if it has arrived."""
        ...

    async def wait_until_lost(self) -> None:
        """Return once the connection was lost and every frame that had arrived before was received."""
        ...

    async def close(self, linger_ms: int) -> None:
        """Close, after what was sent has left or `linger_ms` have passed."""
        ...


# Sockets of all connections of a process: ZeroMQ's own limit of 1,023 is reached at 340 replicas.
MAX_SOCKETS = 65_000


class _SharedContext:
    """The ZeroMQ context of all connections of this process: two threads, which a context each would multiply."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.asyncio.Context | None = None
        self._num_users = 0

    def acquire(self) -> zmq.asyncio.Context:
        """Return the context, which is made for its first user."""
        with self._lock:
            if self._context is None:
                self._context = zmq.asyncio.Context()
                self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
            self._num_users += 1
            return self._context

    def release(self) -> None:
        """End a use. The last user waits until what any of them sent has left, or its linger has passed."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            context, self._context = self._context, None
        assert context is not None, "a context is released more often than it was acquired"
        context.term()


_shared_context = _SharedContext()


class ZmqConnection:
    """Connection over a ZeroMQ DEALER.

    Args:
        address: endpoint of the scheduler's ROUTER.
        keys: CURVE keys of a tcp address; None for an ipc address.
    """

    def __init__(self, address: str, keys: CurveKeys | None = None) -> None:
        self._address = address
        self._keys = keys

    def open(self) -> None:
        self._socket = _shared_context.acquire().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Sending never blocks: the heartbeat fails a silent replica, which bounds the unsent messages.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._arrived_frames: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._events: zmq.asyncio.Socket = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect(self._socket, self._address, self._keys)

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    async def receive(self) -> bytes:
        frame: bytes = await self._socket.recv()
        return frame

    def receive_arrived(self) -> bytes | None:
        try:
            return self._arrived_frames.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def wait_until_lost(self) -> None:
        while parse_monitor_message(await self._events.recv_multipart())["event"] != zmq.EVENT_DISCONNECTED:
            pass
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # its last messages give the reason
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)  # the event loop may have just taken one from the socket for `receive`

    async def close(self, linger_ms: int) -> None:
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close(linger=linger_ms)
        await asyncio.to_thread(_shared_context.release)
