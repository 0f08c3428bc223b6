"""Wakeup: ends a thread's poll of its ZeroMQ sockets from any other thread."""

from __future__ import annotations

import threading
from typing import Any

import zmq


class Wakeup:
    """An inproc PUSH/PULL pair: ZeroMQ sockets are not thread-safe, so each `wake` sends through a socket of its own.

    The polling thread registers `socket` for reading beside its own sockets and calls `clear` once `socket` is
    readable. Call `close` before the context is destroyed: waking during the context's end would block it.

    Attributes:
        socket: readable from a `wake` until the next `clear`.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context
        self._endpoint = f"inproc://wakeup-{id(self)}"
        self._lock = threading.Lock()  # held while a `wake` sends and while the socket closes
        self.socket = context.socket(zmq.PULL)
        self.socket.bind(self._endpoint)

    def wake(self) -> None:
        """Makes `socket` readable. Does nothing once closed."""
        with self._lock:
            if self.socket.closed:
                return
            with self._context.socket(zmq.PUSH) as sender:
                sender.connect(self._endpoint)
                sender.send(b"")

    def clear(self) -> None:
        """Forgets every `wake` so far. For the polling thread."""
        while self.socket.poll(0):
            self.socket.recv()

    def close(self) -> None:
        """Waits for a `wake` that is sending, and closes the socket. Safe to call twice."""
        with self._lock:
            self.socket.close()
